// All jobs that the user may see: filtered by the service, a page at a time, each on one line.

import * as api from '../api.js';
import { h, say, show } from '../dom.js';
import { Feed } from '../feed.js';
import * as f from '../format.js';
import { colourOf } from '../palette.js';
import { empty, firstJob, isLive, jobLink, progress, shortName, slackChip, stateChip, STATE_NAMES, table, taskName, time } from '../parts.js';

const KINDS = { live: 'Live', ended: 'Ended', all: 'All' };
const PAGE = 100;
const CARDS_BELOW_PX = 1080; // As page.css has it: in a narrow view each job is a card.
const FRESH_AT_MOST = 500; // So many are kept up to date; pages beyond them show what was so when they were loaded.
const LIVE_AT_MOST = 1000;
const LATEST_MS = 30000;
const TYPING_MS = 300;

const finish = (job) => (isLive(job) ? job.projected_finish_at : job.result?.finished_at) ?? null;
const slack = (job) => job.result?.slack_s ?? job.slack_s ?? null;
/** What a column is sorted by; null comes last, whichever way. */
const SORTS = {
  Job: (job) => `${job.identity.dag_id} ${taskName(job.identity)}`,
  Submitted: (job) => -job.submitted_at,
  State: (job) => job.state,
  Progress: (job) => (job.total_steps ? -job.step / job.total_steps : null),
  Workers: (job) => -job.workers,
  Finish: finish,
  Deadline: (job) => job.deadline_at,
  Slack: slack,
};

export function open({ main, context, refresh }) {
  const step = () => (main.clientWidth <= CARDS_BELOW_PX ? 20 : PAGE); // So many more are shown at a time.
  const query = new URLSearchParams(location.hash.split('?')[1] ?? '');
  const narrowed = Boolean(context.dag_id);
  const state = { kind: narrowed || query.get('dag') ? 'all' : 'live', text: '', dag: query.get('dag'), state: '', sort: null, down: false };
  let newest = null;
  let wanted = PAGE;
  let shown = step();
  let older = [];
  let cursor = null;
  let typing = null;
  let error = null;
  let first = true;
  const latest = new Feed((signal) => api.latest(signal), LATEST_MS, render);

  const asked = () => ({
    ...context, dag_id: context.dag_id ?? state.dag, text: state.text.trim(), state: state.state,
    live: { live: true, ended: false }[state.kind], limit: state.kind === 'live' ? LIVE_AT_MOST : wanted,
  });

  async function look(signal) {
    const question = asked();
    const answer = await api.jobs(question, signal);
    if (JSON.stringify(question) !== JSON.stringify(asked())) return;
    if (first && context.task_id && answer.jobs.length === 1) {
      const [only] = answer.jobs;
      location.replace(jobLink(only.identity, only.job_id));
      return;
    }
    first = false;
    newest = answer;
    if (!older.length) cursor = answer.next_cursor;
    if (state.kind !== 'ended') latest.tick();
    render();
  }

  async function more() {
    shown += step();
    if (!cursor || matching().length >= shown) {
      render();
      return;
    }
    if (state.kind !== 'live' && wanted < FRESH_AT_MOST) {
      wanted += PAGE;
      refresh();
      return;
    }
    const question = asked();
    try {
      const answer = await api.jobs({ ...question, limit: PAGE, cursor });
      if (JSON.stringify(question) !== JSON.stringify(asked())) return;
      older.push(answer);
      cursor = answer.next_cursor;
      error = null;
      say(`${f.plural(answer.jobs.length, 'more job')}`);
    } catch (problem) {
      error = problem;
      shown -= step();
    }
    render();
  }

  /** The question has changed: what was loaded for the old one is no answer to it. */
  function anew() {
    wanted = PAGE;
    shown = step();
    older = [];
    cursor = null;
    error = null;
    refresh();
  }

  function loaded() {
    const known = new Map();
    for (const page of [newest, ...older]) for (const job of page.jobs) if (!known.has(job.job_id)) known.set(job.job_id, job);
    return [...known.values()];
  }

  function matching() {
    // The service has filtered already, except while somebody types.
    const words = state.text.toLowerCase().split(/\s+/).filter(Boolean);
    const inside = ({ identity, state: now, job_id: id }) => `${id} ${identity.dag_id} ${identity.task_id} ${identity.run_id} ${now}`.toLowerCase();
    const found = loaded()
      .filter((job) => state.kind === 'all' || isLive(job) === (state.kind === 'live'))
      .filter((job) => !state.state || job.state === state.state)
      .filter((job) => words.every((word) => inside(job).includes(word)));
    const by = SORTS[state.sort];
    if (!by) return found.sort((a, b) => Number(isLive(b)) - Number(isLive(a)) || (isLive(a) ? (a.deadline_at ?? Infinity) - (b.deadline_at ?? Infinity) : b.submitted_at - a.submitted_at));
    const way = state.down ? -1 : 1;
    return found.sort((a, b) => {
      const [x, y] = [by(a), by(b)];
      if (x === null || y === null) return Number(x === null) - Number(y === null);
      return way * (typeof x === 'string' ? x.localeCompare(y, undefined, { numeric: true }) : x - y);
    });
  }

  function row(job) {
    const why = f.whole(newest.why[job.job_id] || job.failure || job.state_reason || job.verdict.reason);
    const live = isLive(job);
    const end = latest.value?.[job.job_id];
    const { identity } = job;
    return {
      key: job.job_id,
      cells: [
        h('span', { class: 'job-cell' }, h('span', { class: `swatch c${colourOf(identity.dag_id)}`, 'aria-hidden': 'true' }), shortName(identity, jobLink(identity, job.job_id))),
        h('span', { class: 'run muted', 'data-tip': `${identity.run_id}\nsubmitted ${f.precise(job.submitted_at)}` }, time(job.submitted_at), job.incarnation > 1 ? ` (attempt ${job.incarnation})` : ''),
        stateChip(job),
        progress(job),
        live ? h('span', job.steps_per_s ? { 'data-tip': `${f.number(job.workers)} workers\n${f.number(job.steps_per_s)} steps/s` } : {}, f.number(job.workers)) : '–',
        h('span', end && live ? { 'data-tip': `Projected finish\nwith 95 % probability by ${f.moment(end)}` } : {}, time(finish(job))),
        job.deadline_at === null ? h('span', { class: 'muted' }, 'best effort') : time(job.deadline_at),
        slackChip(job),
        why ? h('span', { class: 'why', tabindex: 0, 'data-tip': why }, why) : '',
      ],
    };
  }

  function filters(counts) {
    const dags = [...new Set([...loaded().map((job) => job.identity.dag_id), ...(state.dag ? [state.dag] : [])])].sort();
    const choose = (name, label, none, options, chosen) => h('select', { class: 'input', 'aria-label': label, 'data-change': name, 'data-key': name },
      h('option', { value: '', selected: !chosen }, none), options.map(([value, text]) => h('option', { value, selected: value === chosen }, text)));
    return h('div', { class: 'bar-line', 'data-key': 'filters' },
      h('fieldset', { class: 'choice' }, h('legend', { class: 'visually-hidden' }, 'Which jobs'),
        Object.entries(KINDS).map(([key, text]) => h('button', { type: 'button', 'data-action': 'kind', value: key, 'aria-pressed': String(key === state.kind), 'data-key': key }, text, key === state.kind ? h('span', { class: 'count' }, ` ${counts}`) : null))),
      h('input', { type: 'search', class: 'input', placeholder: 'DAG, task, run or state', 'aria-label': 'Filter jobs', 'data-input': 'text', 'data-key': 'text' }),
      narrowed ? null : choose('dag', 'DAG', 'All DAGs', dags.map((dag) => [dag, f.middle(dag, 40)]), state.dag),
      choose('state', 'State', 'Any state', Object.entries(STATE_NAMES), state.state),
      h('span', { class: 'when-narrow' }, choose('order', 'Sort by', 'Sort: earliest deadline', Object.keys(SORTS).map((name) => [name, `Sort: ${name.toLowerCase()}`]), state.sort)));
  }

  function render() {
    if (!newest) return;
    const rows = matching();
    const where = context.task_id ? `${context.task_id} of ${context.dag_id}` : context.dag_id ?? state.dag;
    const filtered = Boolean(state.text || state.state || state.dag);
    const heading = (name, kind) => [name, kind, {
      node: h('button', { type: 'button', class: 'sort', 'data-action': 'sort', value: name }, name, h('span', { 'aria-hidden': 'true' }, state.sort === name ? (state.down ? ' ↓' : ' ↑') : '')),
      attributes: { 'aria-sort': state.sort === name ? (state.down ? 'descending' : 'ascending') : null },
    }];
    const columns = [heading('Job', 'job'), heading('Submitted', 'nowrap'), heading('State', ''), heading('Progress', ''), heading('Workers', 'number'), heading('Finish', 'nowrap'), heading('Deadline', 'nowrap'), heading('Slack', 'nowrap'), ['Why', 'reason']];
    const nothing = !loaded().length && !filtered && state.kind === 'all';
    show(
      main,
      h('div', { class: 'page-head' }, h('h1', {}, 'Jobs', where ? h('span', { class: 'muted' }, ` of ${where}`) : null),
        narrowed || state.dag ? h('a', { href: narrowed ? './#/jobs' : '#/jobs', class: 'small', 'data-key': 'all-jobs' }, 'All jobs') : null),
      nothing
        ? where
          ? empty('No ElasticFlow job here', h('p', {}, context.task_id ? 'This task has no training job: it uses another operator, or has not submitted one yet.' : 'No task of this run has submitted a training job yet.'), h('p', {}, h('a', { href: './' }, 'The whole cluster')))
          : empty('No jobs yet', firstJob())
        : [
            filters(`${f.number(rows.length)}${cursor ? '+' : ''}`),
            rows.length
              ? h('div', { class: 'card flush', 'data-key': 'table' }, table('Jobs', columns, rows.slice(0, shown).map(row), { kind: 'jobs' }))
              : h('p', { class: 'quiet-note', 'data-key': 'none' }, state.kind === 'live' && !filtered ? 'No job is live now. Finished jobs are under “Ended”.' : 'No job matches.'),
            error ? h('p', { class: 'banner', role: 'status', 'data-key': 'error' }, `The next page did not come: ${error.message}.`) : null,
            cursor || rows.length > shown ? h('div', { class: 'buttons', 'data-key': 'more' }, h('button', { type: 'button', class: 'button', 'data-action': 'more' }, `Show ${step()} more`)) : null,
          ],
    );
    view.hasShown = true;
  }

  const view = {
    title: 'Jobs',
    everyMs: 3000,
    hasShown: false,
    look,
    close() {
      clearTimeout(typing);
      latest.stop();
    },
    act(action, target) {
      if (action === 'more') {
        more();
        return;
      }
      if (action === 'sort') {
        state.down = state.sort === target.value && !state.down;
        state.sort = target.value;
      } else if (action === 'order') {
        state.sort = target.value || null;
        state.down = false;
      } else if (action === 'text') {
        state.text = target.value;
        clearTimeout(typing);
        typing = setTimeout(anew, TYPING_MS);
      } else if (['kind', 'dag', 'state'].includes(action)) {
        state[action] = target.value || (action === 'dag' ? null : '');
        anew();
      } else return;
      render();
    },
  };
  return view;
}
