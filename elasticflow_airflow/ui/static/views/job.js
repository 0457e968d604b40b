// One job: everything that the service knows about it, while it runs and after.

import * as api from '../api.js';
import { draw, place } from '../charts.js';
import { h, show } from '../dom.js';
import { TONES } from '../event_kinds.js';
import { saveAsPage } from '../export.js';
import { Feed } from '../feed.js';
import * as f from '../format.js';
import { amendment } from '../amend.js';
import { LogTail } from '../log.js';
import { airflowTask, card, chip, confirmed, feedNote, fold, isLive, jobLink, jobName, noted, progress, slackChip, stateChip, table, tiles, time, weightsTile } from '../parts.js';
import { choices, resubmit } from '../resubmit.js';
import { asked } from './asked.js';
import { drawCurve, drawRuns, drawStory, runKey } from './job_charts.js';

const RUNS_MS = 30000;
const [FEW_RUNS, MANY_RUNS] = [10, 50];
const LOG_MS = 2500;
const PARTS = [['compute_s', 'compute', 'Compute'], ['data_s', 'data', 'Data'], ['reduce_s', 'reduce', 'Reduce'], ['wait_s', 'wait', 'Wait'], ['pause_s', 'pause', 'Pause'], ['save_s', 'save', 'Save'], ['other_s', 'other', 'Other']];

export function open({ main, rest: [dag, job], refresh }) {
  const got = { story: null, events: [] };
  const state = { incarnation: null, note: null, stacks: null, runs: FEW_RUNS, beside: '' };
  const log = new LogTail(dag, job);
  const feeds = {
    runs: new Feed((signal) => api.runs(dag, job, state.runs, signal), RUNS_MS, render),
    log: new Feed(async (signal) => {
      await log.read(got.story.status, signal);
      return log.name;
    }, LOG_MS, () => log.draw()),
  };

  async function look(signal) {
    const after = got.events.at(-1)?.event_id ?? 0;
    const [story, events] = await Promise.all([api.story(dag, job, state.incarnation, signal), api.events(dag, job, after, signal)]);
    got.story = story;
    got.events.push(...events.filter((event) => event.event_id > (got.events.at(-1)?.event_id ?? 0)));
    for (const feed of Object.values(feeds)) feed.tick();
    render();
  }

  function render() {
    const { story } = got;
    if (!story) return;
    const { status } = story;
    show(main, head(story), state.note ? h('p', { class: `banner ${state.note.tone}`, role: 'status', 'data-key': 'note' }, state.note.text) : null, why(story), numbers(story),
      trained(story) ? [course(story), h('div', { class: 'columns', 'data-key': 'curve-workers' }, curve(story), workers(story))] : null,
      status.state === 'rejected' && status.incarnation === story.incarnations ? canBeDone(story) : null,
      h('div', { class: 'columns', 'data-key': 'decisions-runs' }, decisions(got.events, status.incarnation), comparison(feeds.runs, status, state)),
      trained(story) ? h('div', { class: 'columns', 'data-key': 'checkpoints-asked' }, checkpoints(story), asked(story)) : asked(story),
      trained(story) ? logs(status) : null, stacks(status));
    view.hasShown = true;
    log.draw();
    drawStory(story);
    drawCurve(story);
    drawRuns(feeds.runs.value ?? [], status, state.beside);
  }

  function head(story) {
    const { status } = story;
    const { identity } = status;
    const live = isLive(status);
    return h('div', { class: 'page-head job-head', 'data-key': 'head' },
      h('div', {}, h('p', { class: 'crumbs small' }, h('a', { href: '#/jobs' }, 'Jobs'), ' / ', h('a', { href: airflowTask(identity), 'data-outside': '' }, 'task in Airflow')),
        h('h1', {}, jobName(identity), ' ', stateChip(status)),
        h('p', { class: 'muted small run' }, identity.run_id, story.incarnations > 1 ? attempts(story) : null)),
      h('div', { class: 'buttons', 'data-noexport': '' },
        live && story.may_edit ? h('button', { type: 'button', class: 'button', 'data-action': 'amend' }, 'Change deadline') : null,
        h('button', { type: 'button', class: 'button', 'data-action': 'export' }, 'Save as page'),
        trained(story) ? h('a', { class: 'button', href: api.traceAddress(dag, job, state.incarnation), download: '' }, 'Save trace') : null,
        live && story.may_edit ? h('button', { type: 'button', class: 'button bad', 'data-action': 'cancel' }, 'Cancel job') : null));
  }

  const attempts = (story) => h('label', { class: 'attempts', 'data-noexport': '' }, ' Attempt ',
    h('select', { class: 'input', 'data-change': 'incarnation', 'data-key': 'incarnation' }, Array.from({ length: story.incarnations }, (_, at) => h('option', { value: at + 1, selected: at + 1 === story.status.incarnation }, String(at + 1)))));

  const stacks = (status) => isLive(status) || state.stacks
    ? card('What the workers are doing', 'The Python stack of each worker, at the moment you ask. Training goes on.',
        h('div', { 'data-noexport': '' }, h('button', { type: 'button', class: 'button', 'data-action': 'stacks' }, 'Dump stacks')),
        state.stacks ? [h('p', { class: 'muted small' }, 'at ', time(state.stacks.at)), Object.entries(state.stacks.stacks).map(([worker, text]) => h('div', { 'data-key': `stack-${worker}` }, h('h3', {}, worker), h('pre', { class: 'code', tabindex: 0 }, text)))] : null)
    : null;

  const logs = (status) => card('Log', null,
    status.log_names.length
      ? [h('div', { class: 'bar-line', 'data-noexport': '' }, h('label', {}, 'Worker ', h('select', { class: 'input', 'data-change': 'log', 'data-key': 'log-name' }, status.log_names.map((name) => h('option', { value: name, selected: name === log.name }, name)))),
          h('label', { class: 'check' }, h('input', { type: 'checkbox', checked: log.follow, 'data-change': 'follow', 'data-key': 'follow' }), ' Follow')),
        h('pre', { id: 'log', class: 'code log', tabindex: 0, 'data-keep': '', 'data-key': 'log', 'aria-label': 'End of the log' })]
      : h('p', { class: 'quiet-note' }, 'No worker has written anything yet.'));

  async function cancel() {
    const { status } = got.story;
    if (!(await confirmed('Cancel this job?', `${jobName(status.identity)} stops at once; its Airflow task fails. Checkpoints are kept.`, 'Cancel job'))) return null;
    await api.cancel(dag, job, status.claim);
    return 'The job is being cancelled.';
  }

  async function doing(work) {
    const done = await noted(work());
    if (done === null) return;
    state.note = done;
    render();
    refresh();
  }

  const view = {
    title: 'Job',
    everyMs: 3000,
    steady: true, // One watches how far it is.
    hasShown: false,
    look,
    close() {
      for (const feed of Object.values(feeds)) feed.stop();
    },
    act(action, target) {
      if (action === 'retry') feeds[target.value]?.again();
      else if (action === 'cancel') doing(cancel);
      else if (action === 'amend') amendment(got.story.status, (change) => doing(async () => {
        const answer = await api.amend(dag, job, { claim: got.story.status.claim, ...change });
        if (!answer.accepted) throw new Error(`${f.sentence(answer.reason)}${answer.earliest_deadline_at ? `; the earliest feasible deadline is ${f.moment(answer.earliest_deadline_at)}` : ''}`);
        return 'The deadline was changed.';
      }));
      else if (action === 'resubmit') doing(() => resubmit(got.story.status, JSON.parse(target.value)));
      else if (action === 'stacks') doing(async () => {
        state.stacks = await api.stacks(dag, job);
        return 'The stacks are below the log.';
      });
      else if (action === 'export') saveAsPage(main, `${job}.html`, jobName(got.story.status.identity), { ...got, runs: feeds.runs.value ?? [] }).catch((error) => {
        state.note = { tone: 'bad', text: error.message };
        render();
      });
      else if (action === 'incarnation') {
        state.incarnation = Number(target.value);
        log.reset(state.incarnation);
        feeds.log.again();
        refresh();
      } else if (action === 'beside') {
        state.beside = target.value;
        render();
      } else if (action === 'older-runs') {
        state.runs = MANY_RUNS;
        feeds.runs.again();
      } else if (action === 'log') {
        log.choose(target.value);
        feeds.log.again();
      } else if (action === 'follow') log.follow = target.checked;
    },
  };
  return view;
}

/** Whether there is, or will be, something to draw: a job that was rejected at once has nothing. */
const trained = (story) => story.status.state !== 'rejected' || story.generations.length > 0;

function canBeDone(story) {
  const { status } = story;
  const earliest = status.verdict.earliest_deadline_at;
  return card('What can be done', earliest ? `The earliest feasible deadline was ${f.moment(earliest)} when it was submitted.` : 'No later deadline is known that could be kept.',
    h('div', { class: 'buttons', 'data-noexport': '' },
      story.may_edit ? choices(status) : null,
      h('a', { class: 'button small-button', href: '#/what-if' }, 'What if other deadlines moved'),
      h('a', { class: 'button small-button', href: airflowTask(status.identity), 'data-outside': '' }, 'Open the task')),
    h('p', { class: 'small muted' }, earliest && story.may_edit ? 'The deadline on offer is as far from now as the earliest feasible one was from the submission; whether it can be promised is decided when the task has started again. ' : null, 'A new deadline holds for later attempts of this run. To change it for every run, change it in the DAG.'));
}

const why = (story) => story.why ? h('p', { class: 'callout', 'data-key': 'why' }, f.whole(story.why)) : null;

function untilDeadline(at) {
  const left = at - f.nowS();
  return left >= 0 ? `${f.duration(left)} until the deadline` : h('span', { class: 'bad-text' }, `the deadline passed ${f.duration(-left)} ago`);
}

function numbers(story) {
  const { status } = story;
  if (!trained(story)) {
    return h('div', { 'data-key': 'numbers' }, tiles(
      ['Deadline asked for', status.deadline_at === null ? '–' : time(status.deadline_at), status.best_effort ? 'best effort' : ''],
      ['Earliest feasible', time(status.verdict.earliest_deadline_at), 'when it was submitted'],
      ['Submitted', time(status.submitted_at), `${f.duration(f.nowS() - status.submitted_at)} ago`]));
  }
  const late = isLive(status) ? story.latest_at : null;
  const live = isLive(status);
  const ended = status.result?.finished_at;
  return h('div', { 'data-key': 'numbers' }, progress(status), tiles(
    ['Workers', f.number(status.workers), status.logical_workers ? `up to ${status.logical_workers}` : 'as many as there are slots'],
    weightsTile(status),
    ['Steps per second', status.steps_per_s ? f.number(status.steps_per_s) : '–', [status.loss !== null ? `loss ${f.number(status.loss)}` : 'no loss reported', story.samples_per_s ? `, ${f.number(story.samples_per_s)} samples/s` : '',
      story.noise_scale ? h('span', { title: 'Gradient noise scale, in samples: global batches beyond it pay little' }, `, noise scale ${f.number(story.noise_scale)}`) : null]],
    [live ? 'Projected finish' : 'Ended', [time(live ? status.projected_finish_at : ended), late ? h('small', { class: 'nowrap' }, ' 95 % by ', time(late)) : null], status.deadline_at === null ? 'best effort' : h('span', {}, 'deadline ', time(status.deadline_at))],
    ['Slack', slackChip(status), live && status.deadline_at !== null ? untilDeadline(status.deadline_at) : ''],
    status.result ? ['Slot hours', f.number(status.result.gpu_seconds / 3600), f.plural(status.result.rescales, 'rescale')] : ['Submitted', time(status.submitted_at), `${f.duration(f.nowS() - status.submitted_at)} ago`],
  ));
}

const course = (story) => card('Course', story.samples.length ? null : 'The first progress report draws the curves.',
  place('chart-story', 'Line charts over time: workers, loss and steps per second; the tables below have the numbers', 420),
  fold('generations', 'Workers as a table', table('Workers over time', [['From', 'nowrap'], ['Until', 'nowrap'], ['Workers', 'number'], ['Slots', ''], ['Start-up', 'number'], ['Pause', 'number'], ['Why', 'wide']],
    [...story.generations, ...story.planned.map((span) => ({ ...span, planned: true }))].map((span, at) => ({ key: `g${at}`, cells: [
      time(span.from_at), span.until_at === null ? 'now' : time(span.until_at), f.number(span.workers), span.planned ? 'planned' : span.slots.map(([node, index]) => `${node}:${index}`).join(' '),
      span.running_at ? f.duration(span.running_at - span.from_at) : '–', span.pause_s ? f.duration(span.pause_s) : '–', f.sentence(span.reason)] })))),
  fold('samples', 'Measurements as a table', table('Measurements', [['Time', 'nowrap'], ['Step', 'number'], ['Loss', 'number'], ['Steps/s', 'number'], ['Workers', 'number']],
    story.samples.slice(-100).map((one, at) => ({ key: `m${at}`, cells: [f.momentFine(one.at), f.number(one.step), f.number(one.loss, 4), f.number(one.steps_per_s), f.number(one.workers)] })))));

const curve = (story) => card('Scaling', 'Speed by number of workers: as measured, and as the scheduler assumes.',
  story.curve.length
    ? [place('chart-curve', 'Line chart: steps per second by number of workers, measured and assumed', 230),
      fold('curve', 'As a table', table('Scaling curve', [['Workers', 'number'], ['Measured steps/s', 'number'], ['Assumed steps/s', 'number']], story.curve.map((point) => ({ key: `c${point.workers}`, cells: [f.number(point.workers), f.number(point.measured_steps_per_s), f.number(point.reckoned_steps_per_s)] }))))]
    : h('p', { class: 'quiet-note' }, 'Not measured yet. The curve fills as the job trains with different numbers of workers.'));

function workers(story) {
  const all = story.workers.map((worker) => ({ worker, sum: PARTS.reduce((sum, [part]) => sum + worker[part], 0) || 1 }));
  return card('Where the workers’ time goes', 'In the last window of steps.', all.length
    ? [h('ul', { class: 'legend' }, PARTS.map(([part, kind, text]) => story.workers.some((worker) => worker[part] > 0) ? h('li', {}, h('span', { class: `swatch t-${kind}`, 'aria-hidden': 'true' }), text) : null)),
      h('ul', { class: 'splits' }, all.map(({ worker, sum }) => h('li', { 'data-key': worker.worker_id },
        h('span', { class: 'rank' }, `rank ${worker.rank}`),
        h('span', { class: 'split', role: 'img', 'aria-label': `rank ${worker.rank}: ${PARTS.filter(([part]) => worker[part] > 0).map(([part, , text]) => `${text} ${f.percent(worker[part] / sum)}`).join(', ')}` },
          PARTS.map(([part, kind, text]) => worker[part] > 0 ? h('span', { class: `t-${kind}`, style: { 'flex-grow': worker[part] / sum }, 'data-tip': `rank ${worker.rank}\n${text}: ${f.percent(worker[part] / sum)}, ${f.duration(worker[part])}` }) : null)),
        h('span', { class: 'muted small nowrap' }, 'compute ', f.percent(worker.compute_s / sum), worker.device_memory_bytes ?? worker.memory_bytes ? `, ${f.bytes(worker.device_memory_bytes ?? worker.memory_bytes)}` : '')))),
      fold('workers', 'As a table', table('Time of the workers', [['Rank', 'number'], ...PARTS.map(([, , text]) => [text, 'number']), ['Memory', 'number']], story.workers.map((worker) => ({ key: worker.worker_id, cells: [f.number(worker.rank), ...PARTS.map(([part]) => f.duration(worker[part])), f.bytes(worker.device_memory_bytes ?? worker.memory_bytes)] }))))]
    : h('p', { class: 'quiet-note' }, 'Scripts that use the session report this. A plain script shows its speed only.'));
}

function decisions(events, incarnation) {
  const mine = events.filter((event) => event.incarnation === null || event.incarnation === incarnation).slice().reverse();
  return card('Decisions', mine.length > 1 ? `${f.plural(mine.length, 'entry', 'entries')}, newest first` : null, mine.length
    ? h('ol', { class: 'events', tabindex: 0, 'aria-label': 'Decisions' }, mine.slice(0, 300).map((event) => h('li', { 'data-key': `e${event.event_id}`, class: TONES[event.kind] ?? 'quiet' },
        h('div', { class: 'item-line' }, h('strong', {}, event.kind.replaceAll('_', ' ')), h('time', { class: 'muted small nowrap', datetime: f.iso(event.at), title: f.precise(event.at) }, f.momentFine(event.at))),
        event.reason ? h('div', { class: 'small' }, f.whole(event.reason)) : null)))
    : h('p', { class: 'quiet-note' }, 'Nothing has been decided yet.'));
}

function comparison(feed, status, { runs: most, beside }) {
  const isThis = (run) => runKey(run) === runKey(status);
  const runs = feed.value ?? [];
  if (!feed.value || runs.length < 2) {
    return card('Compared with recent runs', null, feedNote(feed, 'runs'), feed.value ? h('p', { class: 'quiet-note' }, 'This is the first run of its task. From the second on they stand side by side here.') : null);
  }
  const others = runs.filter((run) => !isThis(run));
  const attributes = (run) => (isThis(run) ? { class: 'this' } : runKey(run) === beside ? { class: 'beside' } : {});
  return card('Compared with recent runs', null, feedNote(feed, 'runs'),
    h('div', { class: 'bar-line', 'data-noexport': '' },
      h('label', {}, 'Compare with ', h('select', { class: 'input', 'data-change': 'beside', 'data-key': 'beside' }, h('option', { value: '' }, 'all recent runs'), others.map((run) => h('option', { value: runKey(run), selected: runKey(run) === beside }, `the run of ${f.moment(run.submitted_at)}`)))),
      runs.length >= most && most < MANY_RUNS ? h('button', { type: 'button', class: 'button small-button', 'data-action': 'older-runs' }, 'Older runs') : null),
    status.state === 'rejected' ? null : place('chart-runs', 'Line chart: loss by time since the start, this run and the last ones', 220),
    table('Runs of this task', [['Run', ''], ['State', ''], ['Took', 'number'], ['Steps', 'number'], ['Loss', 'number'], ['Slot hours', 'number'], ['Rescales', 'number']], runs.map((run) => ({ key: runKey(run), attributes: attributes(run), cells: [
      isThis(run) ? h('span', {}, 'this run, ', f.moment(run.submitted_at)) : h('a', { href: jobLink(status.identity, run.job_id), title: run.run_id }, f.moment(run.submitted_at)),
      run.met === false ? chip('Late', 'bad', '✕') : stateChip(run), run.started_at ? f.duration((run.finished_at ?? f.nowS()) - run.started_at) : '–', f.number(run.steps), f.number(run.steps ? run.final_loss ?? (isThis(run) ? status.loss : null) : null), f.number(run.slot_s / 3600), f.number(run.rescales)] })), { kind: 'dense' }));
}

const checkpoints = (story) => card('Checkpoints', null, story.checkpoints.length
  ? table('Checkpoints', [['Step', 'number'], ['Written', 'nowrap'], ['Age', 'number'], ['Size', 'number'], ['Status', ''], ['Path', 'wide']], story.checkpoints.slice().sort((a, b) => b.step - a.step).map((one) => ({ key: `${one.generation}-${one.step}`, cells: [
      f.number(one.step), time(one.at), one.at === null ? '–' : f.duration(f.nowS() - one.at), f.bytes(one.size_bytes), one.promoted ? chip('Promoted', 'ok', '✓', 'Airflow may use it') : chip(f.whole(one.status || 'candidate').slice(0, -1), 'quiet'), h('code', { class: 'path', title: one.digest }, one.path)] })), { kind: 'dense' })
  : h('p', { class: 'quiet-note' }, 'No checkpoint has been written yet.'));
