// Pieces that several views show: state and slack, progress, empty and failed states.

import { h, s, say } from './dom.js';
import * as f from './format.js';

const STATES = {
  submitted: ['Submitted', 'quiet', '○'],
  profiling: ['Measuring', 'info', '◔'],
  waiting: ['Waiting', 'warn', '◷'],
  admitted: ['Admitted', 'info', '◷'],
  running: ['Running', 'accent', '▶'],
  suspended: ['Suspended', 'warn', '❙❙'],
  succeeded: ['Succeeded', 'ok', '✓'],
  failed: ['Failed', 'bad', '✕'],
  cancelled: ['Cancelled', 'quiet', '⊘'],
  rejected: ['Rejected', 'bad', '✕'],
};
export const TERMINAL = new Set(['succeeded', 'failed', 'cancelled', 'rejected']);
export const isLive = (job) => !TERMINAL.has(job.state);

/** A small label; its colour is never the only thing that tells. */
export const chip = (text, tone = 'quiet', mark = null, title = null) =>
  h('span', { class: `chip ${tone}`, title }, mark ? h('span', { 'aria-hidden': 'true', class: 'mark' }, mark) : null, text);

export const STATE_NAMES = Object.fromEntries(Object.entries(STATES).map(([state, [text]]) => [state, text]));

/** Whether a live job will miss its deadline, or may. */
export const isInDoubt = (job) => isLive(job) && ((job.slack_s ?? 0) < 0 || job.at_risk);

/** The state of a job; one that will miss its deadline looks like it, whatever its state is. */
export function stateChip(job) {
  const [text, tone, mark] = STATES[job.state] ?? [job.state, 'quiet', '○'];
  if (!isInDoubt(job)) return chip(text, tone, mark);
  return chip(`${text}, ${(job.slack_s ?? 0) < 0 ? 'late' : 'at risk'}`, 'bad', '!');
}

const OUTCOMES = {
  kept: ['On track', 'ok', '✓'],
  at_risk: ['At risk', 'bad', '!'],
  undecided: ['Undecided', 'quiet', '?'],
  missed: ['Would be rejected', 'bad', '✕'],
  unknown: ['Unknown', 'quiet', '?'],
};
/** What will become of a forecast item; who is projected to finish after the deadline is late, and no longer at risk. */
export function outcomeChip({ outcome, projected_at: finish, deadline_at: deadline }) {
  if (outcome === 'at_risk' && finish && deadline && finish > deadline) return chip('Late', 'bad', '!');
  const [text, tone, mark] = OUTCOMES[outcome] ?? [outcome, 'quiet', '?'];
  return chip(text, tone, mark);
}

const DECISIONS = {
  admitted: ['Admitted', 'ok', '✓'],
  best_effort: ['Best effort', 'quiet', '∼'],
  renegotiated: ['Later deadline', 'warn', '↷'],
  rejected: ['Rejected', 'bad', '✕'],
  undecided: ['Undecided', 'quiet', '?'],
};
export function decisionChip(decision) {
  const [text, tone, mark] = DECISIONS[decision] ?? [decision, 'quiet', '?'];
  return chip(text, tone, mark);
}

/** What decides on the weights of a job beside its code: a title, a number, and a note for a tile. */
export function weightsTile({ logical_workers: shares, consistency, seed }) {
  const note = seed === null || seed === undefined ? 'seed not known yet' : `seed ${seed}`;
  return ['Logical workers', shares ? f.number(shares) : '–', shares ? note : `${note}, consistency ${consistency}`];
}

const BEGUN = new Set(['running', 'suspended']);

/** How far a job is from its deadline, in words and colour: green is only what trains already. */
export function slackChip(job) {
  if (job.deadline_at === null) return chip('No deadline', 'quiet', '∼');
  if (job.state === 'succeeded') {
    const slack = job.result?.slack_s ?? null;
    if (job.result?.met === false) return chip(slack === null ? 'Late' : `${f.duration(-slack)} late`, 'bad', '✕');
    return chip(slack === null ? 'In time' : `${f.duration(slack)} early`, 'ok', '✓');
  }
  if (!isLive(job)) return chip('–', 'quiet');
  if (job.slack_s === null || job.slack_s === undefined) return chip('Not known yet', 'quiet', '?');
  if (job.slack_s < 0 || job.at_risk) {
    return chip(job.slack_s < 0 ? `${f.duration(-job.slack_s)} late` : `At risk, ${f.duration(job.slack_s)}`, 'bad', '!');
  }
  if (!BEGUN.has(job.state)) return chip(`${f.duration(job.slack_s)} spare`, 'quiet', '◷', 'As planned: it does not train yet');
  const left = job.deadline_at - f.nowS();
  return chip(`${f.duration(job.slack_s)} spare`, job.slack_s < 0.1 * left ? 'warn' : 'ok', job.slack_s < 0.1 * left ? '◷' : '✓');
}

export const taskName = (identity) =>
  `${identity.task_id}${identity.map_index >= 0 ? ` [${identity.map_index}]` : ''}`;
export const jobName = (identity) => `${identity.dag_id} · ${taskName(identity)}`;
/** The same as a link, its names shortened in the middle where they are long; the whole is in the tip and for readers. */
export function shortName(identity, href) {
  const task = taskName(identity);
  const long = identity.dag_id.length + task.length > 44;
  return h('a', { href, class: 'strong nowrap', 'aria-label': long ? jobName(identity) : null, 'data-tip': long ? `${jobName(identity)}\n${identity.run_id}` : null },
    f.middle(identity.dag_id, 22), h('span', { class: 'muted' }, ' · '), f.middle(task, 22));
}
export const jobLink = (identity, jobId) => `#/job/${encodeURIComponent(identity.dag_id)}/${encodeURIComponent(jobId)}`;

export function progress(job) {
  const total = job.total_steps;
  if (!total) {
    return h('div', { class: 'progress-text' }, job.step ? `${f.number(job.step)} steps` : '–');
  }
  const part = Math.min(1, job.step / total);
  const label = `${f.number(job.step)} of ${f.number(total)} steps`;
  return h(
    'div',
    { class: 'progress' },
    h(
      'div',
      { class: 'bar', role: 'progressbar', 'aria-valuemin': 0, 'aria-valuemax': total, 'aria-valuenow': job.step, 'aria-label': `Progress of ${jobName(job.identity)}`, 'aria-valuetext': label },
      h('div', { class: `done ${TERMINAL.has(job.state) ? job.state : ''}`, style: { width: `${(100 * part).toFixed(1)}%` } }),
    ),
    h('div', { class: 'progress-text', 'data-tip': label }, f.percent(part), h('span', { class: 'muted' }, ` ${f.number(job.step)} / ${f.number(total)}`)),
  );
}

export const time = (at) =>
  at === null || at === undefined ? '–' : h('time', { datetime: f.iso(at), title: f.precise(at) }, f.moment(at));

/** A few numbers at the top of a view. */
export const tiles = (...all) =>
  h('dl', { class: 'tiles' }, all.filter(Boolean).map(([label, value, note, tone]) =>
    h('div', { class: 'tile' }, h('dt', {}, label), h('dd', { class: 'value' }, value), h('dd', { class: tone ? `note ${tone}` : 'note' }, note ?? ''))));

export const card = (title, note, ...children) =>
  h('section', { class: 'card', 'aria-label': title, 'data-key': `card-${title}` }, h('header', {}, h('h2', {}, title), note ? h('p', { class: 'note' }, note) : null), children);

/** A table that becomes a list of cards on a phone; columns: [title, class], and {node, attributes} of another heading. */
export function table(caption, columns, rows, options = {}) {
  const head = columns.map(([title, kind, { node = title, attributes } = {}]) => h('th', { scope: 'col', role: 'columnheader', class: kind, ...attributes }, node));
  const body = rows.map(({ key, cells, attributes }) =>
    h('tr', { role: 'row', 'data-key': key, ...attributes }, cells.map((cell, at) =>
      h(at === 0 ? 'th' : 'td', { class: columns[at][1], role: at === 0 ? 'rowheader' : 'cell', scope: at === 0 ? 'row' : null, 'data-label': columns[at][0] }, cell))));
  return h(
    'div',
    { class: `table-box ${options.kind ?? ''}`, tabindex: 0, role: 'group', 'aria-label': caption },
    h('table', { role: 'table' }, h('caption', { class: 'visually-hidden' }, caption), h('thead', { role: 'rowgroup' }, h('tr', { role: 'row' }, head)), h('tbody', { role: 'rowgroup' }, body)),
  );
}

export const fold = (key, title, ...children) =>
  h('details', { class: 'fold', 'data-key': key }, h('summary', {}, title), children);

/** In the place of a part that has not come yet, or beside one that is not up to date; null where all is well. */
export function feedNote(feed, name) {
  if (feed.error) {
    return h('p', { class: 'banner', role: 'status', 'data-key': `late-${name}` }, feed.value ? 'Not up to date: ' : 'Not loaded: ', f.sentence(feed.error.message), '. This page tries again by itself. ',
      h('button', { type: 'button', class: 'button small-button', 'data-action': 'retry', value: name }, 'Try again'));
  }
  if (feed.value) return null;
  return h('p', { class: 'quiet-note loading-part', role: 'status', 'data-key': `late-${name}` }, feed.slow ? 'Still loading…' : 'Loading…');
}

const picture = () =>
  s('svg', { viewBox: '0 0 120 60', width: 120, height: 60, class: 'picture', 'aria-hidden': 'true' },
    s('rect', { x: 6, y: 8, width: 44, height: 10, rx: 5 }),
    s('rect', { x: 28, y: 25, width: 74, height: 10, rx: 5, class: 'strong' }),
    s('rect', { x: 6, y: 42, width: 58, height: 10, rx: 5 }),
    s('path', { d: 'M108 4v52', class: 'line' }));

/** Nothing to show: say why, and what would change that. */
export const empty = (title, ...children) => h('div', { class: 'empty' }, picture(), h('h2', {}, title), children);

/** The same where nothing else is shown: its title is the page's. */
const nothingElse = (title, ...children) => h('div', { class: 'empty' }, picture(), h('h1', {}, title), children);

export const code = (text) => h('pre', { class: 'code', tabindex: 0 }, text);

const FIRST_JOB = `from datetime import timedelta
from airflow.sdk import DAG
from elasticflow_airflow.operators import ElasticTrainOperator

with DAG("nightly", schedule="@daily"):
    ElasticTrainOperator(
        task_id="train",
        script="train.py",
        steps=2000,
        global_batch_size=64,
        deadline=timedelta(hours=2),  # say by when, never how many GPUs
    )`;

export const firstJob = () => [
  h('p', {}, 'Say in a DAG what to train and by when. The job appears here as soon as its task starts.'),
  code(FIRST_JOB),
];

/** A sentence for a terminal, without its marks for code. */
const plain = (text) => (text ?? '').replaceAll('`', '');

/** What went wrong, in the place where the data would be. */
export function failure(error) {
  const told = {
    not_started: ['No service is running yet', [h('p', {}, `${error.message}: ${error.hint}.`), code(FIRST_JOB)]],
    away: ['The service does not answer', [h('p', {}, f.whole(plain(error.message))), h('p', { class: 'muted' }, f.whole(plain(error.hint))), h('p', {}, 'What trains goes on. This page tries again by itself.')]],
    airflow_away: ['Airflow does not answer', [h('p', {}, 'This page tries again by itself.')]],
    no_connection: ['The connection is missing', [h('p', {}, error.message), h('p', { class: 'muted' }, error.hint)]],
    token: ['The service refuses Airflow’s token', [h('p', {}, error.message), h('p', { class: 'muted' }, error.hint)]],
    version: ['The service is of another version', [h('p', {}, error.message), h('p', { class: 'muted' }, error.hint)]],
    job_not_found: ['There is no such job', [h('p', {}, 'It may have been removed after its time, belong to another cluster, or to a DAG that you may not read.'), h('p', {}, h('a', { href: '#/jobs' }, 'All jobs'))]],
  }[error.code];
  if (told) return nothingElse(told[0], told[1]);
  if (error.status === 401) return nothingElse('Your session has ended', h('p', {}, h('a', { href: '', 'data-action': 'reload' }, 'Sign in again')));
  if (error.status === 403) return nothingElse('You may not see this', h('p', {}, 'Airflow does not let you read this DAG. Ask an administrator for the permission.'));
  return nothingElse('This cannot be shown now', h('p', {}, error.message), error.hint ? h('p', { class: 'muted' }, error.hint) : null);
}

/** Airflow's own page of a task: our frame may not navigate the window, but a link of the outer page may. */
export function airflowTask(identity) {
  const path = ['dags', identity.dag_id, 'runs', identity.run_id, 'tasks', identity.task_id].map(encodeURIComponent).join('/');
  const mapped = identity.map_index >= 0 ? `/mapped/${identity.map_index}` : '';
  return new URL(`../${path}${mapped}`, document.baseURI).href;
}

export function openOutside(address) {
  let outer = document;
  try {
    outer = window.parent.document;
  } catch {
    // Framed by another site: the link opens in the frame.
  }
  const link = outer.createElement('a');
  link.href = address;
  outer.body.append(link);
  link.click();
  link.remove();
}

/** What came of something that somebody wanted done, as a note to show; it is said, too. Null: nothing was done. */
export async function noted(work) {
  let note;
  try {
    const text = await work;
    if (text === null) return null;
    note = { tone: 'ok', text };
  } catch (error) {
    const message = error.status === 403 ? 'Airflow does not let you change this DAG’s jobs' : error.message;
    note = { tone: 'bad', text: `${message}${error.hint ? ` (${error.hint})` : ''}` };
  }
  say(note.text);
  return note;
}

/** A question with two answers; true when the first was chosen. */
export function confirmed(title, text, yes, tone = 'bad') {
  return new Promise((answer) => {
    const dialog = h(
      'dialog',
      { 'aria-labelledby': 'ask-title' },
      h('form', { method: 'dialog' }, h('h2', { id: 'ask-title' }, title), h('p', {}, text),
        h('div', { class: 'buttons' }, h('button', { value: 'no', class: 'button' }, 'Keep it'), h('button', { value: 'yes', class: `button ${tone}` }, yes))),
    );
    dialog.addEventListener('close', () => {
      dialog.remove();
      answer(dialog.returnValue === 'yes');
    });
    document.body.append(dialog);
    dialog.showModal();
  });
}
