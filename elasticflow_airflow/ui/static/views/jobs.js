// All jobs that the user may see, each with the one sentence that says why it has this size, or why it waits.

import * as api from '../api.js';
import { h, show } from '../dom.js';
import * as f from '../format.js';
import { colourOf } from '../palette.js';
import { empty, firstJob, isLive, jobLink, progress, slackChip, stateChip, table, taskName, time } from '../parts.js';

const KINDS = { live: 'Live', ended: 'Ended', all: 'All' };

export function open({ main, context, refresh }) {
  const query = new URLSearchParams(location.hash.split('?')[1] ?? '');
  const narrowed = Boolean(context.dag_id);
  const state = { kind: narrowed || query.get('dag') ? 'all' : 'live', text: '', dag: query.get('dag') };
  let answer = null;
  let first = true;

  async function look(signal) {
    answer = await api.jobs({ ...context, dag_id: context.dag_id ?? state.dag, limit: 500 }, signal);
    if (first && context.task_id && answer.jobs.length === 1) {
      const [only] = answer.jobs;
      location.replace(jobLink(only.identity, only.job_id));
      return;
    }
    first = false;
    render();
  }

  function matching() {
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    return answer.jobs
      .filter((job) => state.kind === 'all' || isLive(job) === (state.kind === 'live'))
      .filter((job) => {
        const inside = `${job.identity.dag_id} ${job.identity.task_id} ${job.identity.run_id} ${job.state}`.toLowerCase();
        return words.every((word) => inside.includes(word));
      })
      .sort((a, b) => Number(isLive(b)) - Number(isLive(a)) || (isLive(a) ? (a.deadline_at ?? Infinity) - (b.deadline_at ?? Infinity) : b.submitted_at - a.submitted_at));
  }

  function row(job) {
    const why = answer.why[job.job_id] || job.failure || job.state_reason || job.verdict.reason;
    const live = isLive(job);
    return {
      key: job.job_id,
      cells: [
        h('div', { class: 'job-cell' }, h('span', { class: `swatch c${colourOf(job.identity.dag_id)}`, 'aria-hidden': 'true' }),
          h('div', {}, h('a', { href: jobLink(job.identity, job.job_id), class: 'strong' }, job.identity.dag_id, h('span', { class: 'muted' }, ' · '), taskName(job.identity)),
            h('div', { class: 'muted small run' }, job.identity.run_id, job.incarnation > 1 ? ` (attempt ${job.incarnation})` : ''))),
        stateChip(job.state),
        progress(job),
        live ? h('div', { class: 'two' }, h('span', {}, f.number(job.workers)), job.steps_per_s ? h('span', { class: 'muted small' }, `${f.number(job.steps_per_s)} steps/s`) : null) : '–',
        h('div', { class: 'two' }, h('span', {}, time(live ? job.projected_finish_at : job.result?.finished_at)), live && answer.latest[job.job_id] ? h('span', { class: 'muted small' }, '95 %: ', time(answer.latest[job.job_id])) : null, h('span', { class: 'muted small' }, job.deadline_at === null ? 'best effort' : ['due ', time(job.deadline_at)])),
        slackChip(job),
        h('span', { class: 'why' }, f.whole(why)),
      ],
    };
  }

  function render() {
    if (!answer) return;
    const rows = matching();
    const counts = { live: answer.jobs.filter(isLive).length, all: answer.jobs.length };
    counts.ended = counts.all - counts.live;
    const where = context.task_id ? `${context.task_id} of ${context.dag_id}` : context.dag_id ?? state.dag;
    show(
      main,
      h('div', { class: 'page-head' }, h('h1', {}, 'Jobs', where ? h('span', { class: 'muted' }, ` of ${where}`) : null),
        narrowed || state.dag ? h('a', { href: narrowed ? './#/jobs' : '#/jobs', class: 'small', 'data-key': 'all-jobs' }, 'All jobs') : null),
      answer.jobs.length
        ? [
            h('div', { class: 'bar-line', 'data-key': 'filters' },
              h('fieldset', { class: 'choice' }, h('legend', { class: 'visually-hidden' }, 'Which jobs'),
                Object.entries(KINDS).map(([key, text]) => h('button', { type: 'button', 'data-action': 'kind', value: key, 'aria-pressed': String(key === state.kind), 'data-key': key }, text, h('span', { class: 'count' }, ` ${counts[key]}`)))),
              h('input', { type: 'search', class: 'input', placeholder: 'Filter by DAG, task, run or state', 'aria-label': 'Filter jobs', 'data-input': 'text', 'data-key': 'text' })),
            rows.length
              ? h('div', { class: 'card flush', 'data-key': 'table' }, table('Jobs', [['Job', 'job'], ['State', ''], ['Progress', ''], ['Workers', 'nowrap'], ['Finish, deadline', 'nowrap'], ['Slack', 'nowrap'], ['Why', 'wide']], rows.map(row), { kind: 'jobs' }))
              : h('p', { class: 'quiet-note', 'data-key': 'none' }, state.kind === 'live' && !state.text ? 'No job is live now. Those that ended are under “Ended”.' : 'No job matches.'),
          ]
        : where
          ? empty('No ElasticFlow job here', h('p', {}, context.task_id ? 'This task has no training job: it is another operator’s, or it has not submitted one yet.' : 'No task of this run has submitted a training job yet.'), h('p', {}, h('a', { href: './' }, 'The whole cluster')))
          : empty('No jobs yet', firstJob()),
    );
    view.hasShown = true;
  }

  const view = {
    title: 'Jobs',
    everyMs: 3000,
    hasShown: false,
    look,
    act(action, target) {
      if (action === 'kind') state.kind = target.value;
      else if (action === 'text') state.text = target.value;
      else return;
      render();
      if (!answer) refresh();
    },
  };
  return view;
}
