// What needs somebody's attention, on top of the cluster: each job with one sentence, and what can be done.

import { h } from '../dom.js';
import * as f from '../format.js';
import { choices } from '../resubmit.js';
import { airflowTask, card, chip, feedNote, fold, isLive, jobLink, jobName, shortName, time } from '../parts.js';

const SHOWN = 5;
const KINDS = {
  late: ['Late', 'bad', '!'],
  at_risk: ['At risk', 'warn', '!'],
  set_aside: ['Set aside', 'warn', '❙❙'],
  unowned: ['No owner', 'warn', '?'],
  rejected: ['Rejected', 'bad', '✕'],
  failed: ['Failed', 'bad', '✕'],
};

/** The card; null while nothing is known. */
export function needsAttention(feed, mayEdit) {
  if (feed.error) return card('Needs attention', null, feedNote(feed, 'attention'));
  if (!feed.value?.items.length) return null;
  const rows = feed.value.items.map((one) => item(one, mayEdit.includes(one.job.identity.dag_id)));
  const more = rows.slice(SHOWN);
  return card('Needs attention', null,
    h('ul', { class: 'items attention' }, rows.slice(0, SHOWN)),
    more.length ? fold('attention-more', `${f.plural(more.length, 'more job')}`, h('ul', { class: 'items attention' }, more)) : null);
}

function item({ trouble, job, sentence }, mayEdit) {
  const [text, tone, mark] = KINDS[trouble];
  const { identity } = job;
  return h('li', { 'data-key': `attention-${job.job_id}` },
    chip(text, tone, mark),
    h('div', { class: 'matter' },
      h('div', {}, shortName(identity, jobLink(identity, job.job_id)), h('span', { class: 'muted small nowrap' }, ' submitted ', time(job.submitted_at))),
      h('div', { class: 'small' }, f.whole(`${sentence}${because(trouble, job)}`))),
    h('div', { class: 'buttons' }, actions(trouble, job, mayEdit)));
}

/** The rest of the sentence: the first clause of the job's own reason; its page has all of it. */
function because(trouble, job) {
  const why = { rejected: job.verdict.reason, failed: job.failure || job.state_reason, set_aside: job.set_aside }[trouble];
  const earliest = trouble === 'rejected' ? job.verdict.earliest_deadline_at : null;
  return [why ? `: ${why.split(/\n|; /, 1)[0]}` : '', earliest ? `; earliest feasible deadline: ${f.moment(earliest)}` : ''].join('');
}

function actions(trouble, job, mayEdit) {
  const link = (href, text, more) => h('a', { class: 'button small-button', href, ...more }, text);
  return [
    ['late', 'at_risk'].includes(trouble) ? link(`#/what-if?job=${encodeURIComponent(job.job_id)}`, 'What if') : null,
    isLive(job) && mayEdit && !job.best_effort && trouble !== 'unowned'
      ? h('button', { type: 'button', class: 'button small-button', 'data-action': 'best-effort', 'data-dag': job.identity.dag_id, 'data-job': job.job_id, 'data-claim': job.claim, 'aria-label': `Make best effort: ${jobName(job.identity)}` }, 'Make best effort')
      : null,
    trouble === 'rejected' && mayEdit ? choices(job) : null,
    link(airflowTask(job.identity), isLive(job) ? 'Open the task' : 'Open the task to rerun it', { 'data-outside': '' }),
  ];
}
