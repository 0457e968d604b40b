// The cluster: now, the last days, what is planned, and what will become of everything that is due.

import * as api from '../api.js';
import { draw, place } from '../charts.js';
import { h, show } from '../dom.js';
import { Feed } from '../feed.js';
import * as f from '../format.js';
import { gantt, legend, walk } from '../gantt.js';
import { colourOf } from '../palette.js';
import { steer, TimeWindow } from '../time_window.js';
import { card, chip, confirmed, decisionChip, empty, feedNote, firstJob, fold, isInDoubt, isLive, jobLink, noted, outcomeChip, table, tiles, time } from '../parts.js';
import { resubmit } from '../resubmit.js';
import { needsAttention } from './attention.js';

const RANGES = { '1h': [1, 0.5, '1 hour'], '6h': [6, 3, '6 hours'], '24h': [24, 12, '24 hours'], '7d': [168, 24, '7 days'] };
const WEEK_S = 7 * 86400;
const HISTORY_MS = 8000;
const WEEK_MS = 60000;
const FORECAST_MS = 30000;
const ATTENTION_MS = 10000;
const RESTING_MS = 250;
const YOUNG_S = 1200;
const LEAST_S = 120;
const [MANY_ITEMS, MOST_ITEMS] = [8, 40];
const MANY_DAGS = 8;
const DAY_S = 86400;
const STEERING = {
  earlier: { label: 'Earlier', sign: '◂', act: (frame, now) => frame.move(-0.5, now) },
  farther: { label: 'Zoom out', sign: '−', act: (frame, now) => frame.zoom(2, now) },
  closer: { label: 'Zoom in', sign: '+', act: (frame, now) => frame.zoom(0.5, now) },
  later: { label: 'Later', sign: '▸', act: (frame, now) => frame.move(0.5, now) },
};

export function open({ main, refresh }) {
  let range = sessionStorage.getItem('elasticflow.range');
  let chosen = Boolean(RANGES[range]);
  if (!chosen) range = '24h';
  const frame = new TimeWindow(RANGES[range][0] * 3600, RANGES[range][1] * 3600);
  const unfolded = new Set();
  let cluster = null;
  let note = null;
  let resting = null;
  const minute = () => Math.ceil(cluster.at / 60) * 60; // All who look in this minute ask the same.
  const feeds = {
    history: new Feed((signal) => {
      const { from, until } = frame.at(frame.follows && frame.pastS > DAY_S ? minute() : cluster.at);
      return api.history(from, until, 120, signal);
    }, HISTORY_MS, render),
    week: new Feed((signal) => api.history(minute() - WEEK_S, minute(), 168, signal), WEEK_MS, () => {
      choose();
      render();
    }),
    forecast: new Feed((signal) => api.forecast(24, signal), FORECAST_MS, render),
    attention: new Feed((signal) => api.attention(signal), ATTENTION_MS, render),
  };

  async function look(signal) {
    cluster = await api.cluster(signal);
    for (const feed of Object.values(feeds)) feed.tick();
    render();
  }

  /** Until somebody chooses: as much time as a young cluster has seen, which would be a stripe at the edge of a day. */
  function choose() {
    const week = feeds.week.value;
    if (chosen || !frame.follows || !week || (!week.admissions.length && !week.spans.length)) return;
    const oldest = Math.min(week.now, ...week.spans.map((span) => span.from_at), ...week.admissions.map((one) => one.submitted_at));
    const ageS = week.now - oldest;
    const found = ageS < YOUNG_S ? null : Object.keys(RANGES).slice(0, 3).find((key) => RANGES[key][0] * 3600 > ageS) ?? '24h';
    if (found === null) {
      range = null;
      const pastS = Math.max(LEAST_S, 1.5 * ageS);
      frame.follow(pastS, pastS / 2);
      feeds.history.again();
    } else if (found !== range) showRange(found);
  }

  /** Show one of the ranges, from now on. */
  function showRange(key) {
    range = key;
    const [past, ahead] = RANGES[key];
    frame.follow(past * 3600, ahead * 3600);
    feeds.history.again();
  }

  /** Somebody has moved the time: what is known is drawn there at once, the rest is asked for when the hand rests. */
  function steered() {
    render();
    clearTimeout(resting);
    resting = setTimeout(() => feeds.history.again(), RESTING_MS);
  }

  function render() {
    if (!cluster) return;
    const { history, week, forecast, attention } = feeds;
    const nothing = !cluster.jobs.length && week.value && forecast.value && !week.value.spans.length && !week.value.admissions.length && !forecast.value.items.length;
    show(main, h('h1', { class: 'visually-hidden' }, 'Cluster'), problems(cluster), overview(cluster, week, forecast),
      note ? h('p', { class: `banner ${note.tone}`, role: 'status', 'data-key': 'note' }, note.text) : null,
      needsAttention(attention, cluster.may_edit),
      nothing ? empty('No training has asked for this cluster yet', firstJob()) : null,
      timeline(history), nothing ? null : [h('div', { class: 'columns', 'data-key': 'columns' }, outlook(forecast), byDag(week)), asks(week)], replicas(cluster));
    view.hasShown = true;
    if (!nothing && week.value) charts(week.value, main);
  }

  async function toBestEffort({ dag, job, claim }) {
    if (!(await confirmed('Make this job best effort?', 'It gives its deadline up, and trains on slots that no promise needs. Other jobs may gain.', 'Best effort', 'primary'))) return null;
    const answer = await api.amend(dag, job, { claim: Number(claim), best_effort: true });
    if (!answer.accepted) throw new Error(f.whole(answer.reason));
    return 'The job is best effort now.';
  }

  async function doing(work) {
    const done = await noted(work);
    if (done === null) return;
    note = done;
    feeds.attention.again();
    refresh();
  }

  function timeline(feed) {
    const { from, until } = frame.at(cluster.at);
    const history = feed.value ?? unknownYet(cluster, from, until);
    const width = Math.max(240, main.querySelector('.gantt-box')?.clientWidth ?? main.clientWidth - 74);
    return card('Jobs on slots', null,
      h('div', { class: 'bar-line' },
        h('fieldset', { class: 'choice' }, h('legend', { class: 'visually-hidden' }, 'Time shown'),
          Object.entries(RANGES).map(([key, [, , text]]) => h('button', { type: 'button', 'data-action': 'range', value: key, 'aria-pressed': String(frame.follows && key === range), 'data-key': key }, text))),
        h('div', { class: 'choice', role: 'group', 'aria-label': 'Move the time shown', title: 'Ctrl and the wheel zoom, dragging moves. Keys: plus, minus, Shift and arrows.' },
          Object.entries(STEERING).map(([action, { label, sign }]) => h('button', { type: 'button', 'data-action': action, 'aria-label': label, 'data-key': action }, sign))),
        frame.follows ? null : h('span', { class: 'muted small', 'data-key': 'shown' }, `${f.moment(from)} – ${f.moment(until, from)}`)),
      feedNote(feed, 'history'),
      left('spans-cut', 'So much was going on that only those blocks are shown that began after ', history.spans_from_at),
      h('div', { class: 'gantt-box', 'data-key': 'gantt-box' }, gantt({ history, cluster, width, from, until, unfolded })),
      legend(history),
      fold('spans', 'As a table', table('Jobs on slots', [['Job', ''], ['From', 'nowrap'], ['Until', 'nowrap'], ['Slots', 'number'], ['Why', 'wide']],
        [...history.spans.slice(-60), ...history.planned.slice(0, 60)].map((span, at) => ({ key: `s${at}`, cells: [
          span.job_id ? h('a', { href: jobLink(span, span.job_id) }, `${span.dag_id} · ${span.task_id}`) : 'another job',
          time(span.from_at), span.until_at === null ? 'now' : time(span.until_at), f.number(span.workers), f.sentence(span.reason) || (span.generation === null && span.job_id ? 'planned' : ''),
        ] })))));
  }

  const view = {
    title: 'Cluster',
    everyMs: 3000,
    hasShown: false,
    look,
    act(action, target) {
      if (action === 'retry') feeds[target.value]?.again();
      if (action === 'best-effort') doing(toBestEffort(target.dataset));
      else if (action === 'resubmit') doing(resubmit(feeds.attention.value.items.find(({ job }) => job.job_id === target.dataset.job).job, JSON.parse(target.value)));
      if (action === 'fold') unfolded[unfolded.has(target.dataset.node) ? 'delete' : 'add'](target.dataset.node);
      if (STEERING[action]) {
        STEERING[action].act(frame, cluster.at);
        steered();
        return;
      }
      if (action === 'range') {
        chosen = true;
        sessionStorage.setItem('elasticflow.range', target.value);
        showRange(target.value);
      }
      render();
    },
    close() {
      for (const feed of Object.values(feeds)) feed.stop();
      clearTimeout(resting);
      stopSteering();
      main.removeEventListener('keydown', walk);
      resized.disconnect();
    },
  };
  main.addEventListener('keydown', walk);
  const stopSteering = steer(main, frame, () => cluster.at, steered);
  let lastWidth = main.clientWidth;
  const resized = new ResizeObserver(() => {
    if (Math.abs(main.clientWidth - lastWidth) < 4) return;
    lastWidth = main.clientWidth;
    render();
  });
  resized.observe(main);
  return view;
}

/** The timeline before anything is known of the past: the slots, and the time that will be shown. */
const unknownYet = (cluster, from, until) => ({
  from_at: from, until_at: until, now: cluster.at, spans: [], planned: [], admissions: [],
  part_s: 3600, held_slot_s: [], computing_slot_s: [], slots: cluster.slots.length, spans_from_at: null,
});

const problems = ({ service }) =>
  service.problems.length ? h('p', { class: 'banner bad', role: 'alert', 'data-key': 'problems' }, h('strong', {}, 'The service reports a problem. '), service.problems.join('; ')) : null;

const replicas = ({ service }) =>
  service.leadership ? h('p', { class: 'quiet-note', 'data-key': 'replicas' }, whoDecides(service.leadership)) : null;

const CHANGES = { start: 'as the first', 'hand-over': 'by a hand-over', 'fail-over': 'by a fail-over' };

/** Who decides among several services, since when and how, and who else is there to take over. */
export function whoDecides({ epoch, leader, elected_at: since, change, failed_over_at: last, replicas: all }) {
  const decides = leader === null
    ? `No replica decides at this moment (epoch ${epoch}). `
    : `${leader} decides since ${f.moment(since)}, ${CHANGES[change] ?? change} (epoch ${epoch}). `;
  const names = all.map((one) => (one.is_gone ? `${one.name} (not heard of for ${f.duration(one.silent_s)})` : one.name));
  return `${decides}Replicas: ${names.join(', ')}. ${last === null ? 'No fail-over so far.' : `Last fail-over: ${f.moment(last)}.`}`;
}

function overview(cluster, { value: week }, forecast) {
  const taken = cluster.slots.filter((slot) => slot.job_id || slot.busy).length;
  const computing = cluster.jobs.filter((job) => job.state === 'running').reduce((all, job) => all + job.workers, 0);
  const visible = new Set(cluster.jobs.map((job) => job.job_id));
  const others = cluster.slots.filter((slot) => (slot.job_id ? !visible.has(slot.job_id) : slot.busy === 'another job')).length;
  const running = cluster.jobs.filter((job) => job.state === 'running').length;
  const waiting = cluster.jobs.filter((job) => isLive(job) && job.state !== 'running').length;
  const judged = week?.by_dag.reduce((all, one) => all + one.judged, 0);
  const met = week?.by_dag.reduce((all, one) => all + one.met, 0);
  const draining = new Set(cluster.slots.filter((slot) => slot.draining_until).map((slot) => slot.node_id)).size;
  return tiles(
    ['Slots in use', h('span', {}, `${taken}`, h('small', {}, ` of ${cluster.slots.length}`)), draining ? `${f.plural(draining, 'node')} leaving` : `${computing} computing${others > 0 ? `, ${others} of other teams` : ''}`],
    ['Jobs', h('span', {}, `${running}`, h('small', {}, ' running')), [waiting ? `${waiting} not running` : '', cluster.hidden_jobs ? `${cluster.hidden_jobs} of other teams` : ''].filter(Boolean).join(', ') || 'none waits'],
    nextDay(cluster, forecast),
    ['Deadlines met, 7 days', judged ? f.percent(met / judged) : '–', judged ? `${f.number(met)} of ${f.number(judged)}` : week ? 'none due yet' : 'loading…'],
  );
}

/** No calm that nobody has vouched for: what is late now counts, too, and what is not known is said to be so. */
export function nextDay({ jobs }, { value: forecast, error }) {
  const title = 'Next 24 hours';
  const late = jobs.filter(isInDoubt).length;
  const lateNow = late ? `${f.plural(late, 'job')} late or at risk now` : null;
  if (error) return [title, '–', lateNow ?? 'the forecast did not come', late ? 'bad' : 'warn'];
  if (!forecast) return [title, '–', lateNow ?? 'loading…', late ? 'bad' : null];
  const open = forecast.items.length - forecast.kept - forecast.not_kept;
  const failing = forecast.not_kept >= Math.max(1, late) ? `${forecast.not_kept} will not make it` : lateNow;
  return [title, h('span', {}, `${forecast.kept}`, h('small', {}, ` of ${forecast.items.length} on track`)),
    failing ?? (open ? `${open} not known yet` : forecast.items.length ? 'nothing at risk' : 'nothing is due'), failing ? 'bad' : null];
}

function outlook(feed) {
  const forecast = feed.error ? null : feed.value; // An old forecast would be a promise that nobody makes any more.
  if (!forecast) return card('Next 24 hours', feed.error ? 'Unknown: the forecast did not come.' : null, feedNote(feed, 'forecast'));
  const ranked = [...forecast.items].sort((a, b) => rankOf(a) - rankOf(b));
  const failing = ranked.filter((item) => rankOf(item) === 0).length;
  const open = ranked.filter((item) => rankOf(item) === 1).length;
  const shown = ranked.slice(0, Math.max(failing, Math.min(MOST_ITEMS, failing + open), MANY_ITEMS));
  const rest = forecast.items.filter((item) => !shown.includes(item));
  const inside = forecast.items.length
    ? [dueByDag(shown), rest.length ? fold('on-track', f.plural(rest.length, 'more', 'more'), dueByDag(rest)) : null]
    : h('p', { class: 'quiet-note' }, 'Recurring tasks appear here once they have run, or when their DAG tells its next runs.');
  return card('Next 24 hours', f.whole(forecast.summary), inside);
}

/** Who fails comes first, then what is not known. */
const rankOf = ({ outcome }) => (['at_risk', 'missed'].includes(outcome) ? 0 : outcome === 'kept' ? 2 : 1);

/** What is due, by DAG, in the order of the first of each. */
const dueByDag = (items) => [...group(items, (item) => item.dag_id)].map(([dag, some]) => h('section', { class: 'dag', 'data-key': `dag-${dag}` },
  h('h3', {}, h('span', { class: `swatch c${colourOf(dag)}`, 'aria-hidden': 'true' }), dag),
  h('ul', { class: 'items' }, some.map((item) => h('li', {},
    h('div', { class: 'item-line' },
      item.job_id ? h('a', { href: jobLink({ dag_id: item.dag_id }, item.job_id) }, item.task.slice(dag.length + 1) || item.task) : h('span', {}, item.task.slice(dag.length + 1) || item.task),
      item.kind === 'expected' ? chip('Expected', 'quiet') : null, outcomeChip(item)),
    h('div', { class: 'muted small' }, item.kind === 'expected' ? ['starts ', time(item.due_at), ', '] : null, item.projected_at ? ['finish ', time(item.projected_at), ', '] : null, item.deadline_at ? ['deadline ', time(item.deadline_at)] : 'no deadline known',
      item.outcome === 'missed' && item.earliest_deadline_at ? ['; earliest feasible: ', time(item.earliest_deadline_at)] : null,
      item.outcome !== 'kept' && item.reason ? h('div', {}, f.whole(item.reason)) : null))))));

function group(items, by) {
  const made = new Map();
  for (const item of items) {
    if (!made.has(by(item))) made.set(by(item), []);
    made.get(by(item)).push(item);
  }
  return made;
}

/** Sums of the service: they count also what is too much to be drawn. */
function byDag(feed) {
  const week = feed.value;
  if (!week) return card('Last 7 days', null, feedNote(feed, 'week'));
  const rows = week.by_dag.slice().sort((a, b) => b.slot_s - a.slot_s);
  const most = rows[0]?.slot_s || 1;
  return card('Last 7 days', null, feedNote(feed, 'week'), rows.length
    ? table('The last seven days by DAG', [['DAG', ''], ['Runs', 'number'], ['Met', 'number'], ['Rejected', 'number'], ['Median wait', 'number'], ['Slot hours', 'number']], rows.map((sums) => ({ key: sums.dag_id, cells: [
        h('a', { href: `#/jobs?dag=${encodeURIComponent(sums.dag_id)}`, class: 'plain', 'data-tip': sums.dag_id.length > 28 ? sums.dag_id : null, 'aria-label': sums.dag_id }, h('span', { class: `swatch c${colourOf(sums.dag_id)}`, 'aria-hidden': 'true' }), f.middle(sums.dag_id, 28)),
        f.number(sums.runs), sums.judged ? h('span', { class: sums.met < sums.judged ? 'warn-text' : '' }, `${sums.met} / ${sums.judged}`) : '–',
        sums.rejected ? h('span', { class: 'bad-text' }, f.number(sums.rejected)) : '0', sums.median_wait_s === null ? '–' : f.duration(sums.median_wait_s),
        h('span', { class: 'meter' }, h('span', { class: `c${colourOf(sums.dag_id)}`, style: { width: `${Math.max(2, (44 * sums.slot_s) / most)}px` } }), f.number(sums.slot_s / 3600)),
      ] })), { kind: 'dense' })
    : h('p', { class: 'quiet-note' }, 'No job has been submitted in the last seven days.'));
}

/** What is not shown, as there was too much of it; null where everything is. */
const left = (key, what, from) => !from ? null : h('p', { class: 'banner', role: 'status', 'data-key': key }, what, time(from), '. The sums by DAG and the deadlines met count all.');

const WAITS = [1, 3, 10, 60, 600, 3600, 36000, 360000];
const KINDS = [['admitted', 'accent', 'Admitted'], ['renegotiated', 'warn', 'Later deadline'], ['best_effort', 'faint', 'Best effort'], ['undecided', 'muted', 'Undecided'], ['rejected', 'bad', 'Rejected']];

function asks(feed) {
  const week = feed.value;
  if (!week) return null; // Its card beside the forecast says why.
  const refused = week.admissions.filter((one) => one.decision === 'rejected').sort((a, b) => b.submitted_at - a.submitted_at).slice(0, 5);
  const started = group(week.admissions.filter((one) => one.started_at !== null), (one) => one.dag_id).size;
  return card('Submissions and waiting, last 7 days', null,
    left('asks-cut', 'So much was submitted that only those are shown that came after ', week.admissions_from_at),
    h('div', { class: 'columns', 'data-key': 'asks' },
      h('figure', {}, h('figcaption', {}, 'Submissions by day'), place('chart-days', 'Bar chart: submissions by day and verdict; the table below has the numbers', 200)),
      h('figure', {}, h('figcaption', {}, 'From submission to the first step', started > MANY_DAGS ? `, ${MANY_DAGS} of ${started} DAGs` : ''), place('chart-waits', 'Box plot: waiting time by DAG; the median is in the table by DAG', 200))),
    refused.length ? h('div', { class: 'refused', 'data-key': 'refused' }, h('h3', {}, 'Last rejections'), h('ul', { class: 'items' }, refused.map((one) => h('li', {},
      h('div', { class: 'item-line' }, h('a', { href: jobLink(one, one.job_id) }, `${one.dag_id} · ${one.task_id}`), h('span', { class: 'muted nowrap' }, time(one.submitted_at)), chip('Rejected', 'bad', '✕')),
      h('div', { class: 'muted small' }, f.whole(one.reason)))))) : null,
    fold('submissions', 'As a table', table('Submissions', [['Job', ''], ['Submitted', 'nowrap'], ['Verdict', ''], ['Waited', 'number'], ['Deadline', 'nowrap'], ['Finished', 'nowrap'], ['Reason', 'wide']],
      week.admissions.slice().sort((a, b) => b.submitted_at - a.submitted_at).slice(0, 100).map((one, at) => ({ key: `a${at}`, cells: [
        h('a', { href: jobLink(one, one.job_id) }, `${one.dag_id} · ${one.task_id}`), time(one.submitted_at), decisionChip(one.decision),
        one.started_at === null ? '–' : f.duration(one.started_at - one.submitted_at), time(one.deadline_at), time(one.finished_at), f.sentence(one.reason)] })))));
}

function charts(week, main) {
  const days = [];
  const midnight = new Date(week.from_at * 1000);
  midnight.setHours(0, 0, 0, 0);
  for (const at = midnight; at.getTime() / 1000 < week.until_at; at.setDate(at.getDate() + 1)) days.push(at.getTime() / 1000);
  const labels = days.map((at) => (main.clientWidth < 560 ? String(new Date(at * 1000).getDate()) : f.onDay(at)));
  draw('chart-days', (c) => ({
    data: KINDS.map(([decision, colour, name]) => {
      const y = days.map((from, at) => week.admissions.filter((one) => one.decision === decision && one.submitted_at >= from && one.submitted_at < (days[at + 1] ?? Infinity)).length);
      return { type: 'bar', name, x: labels, y, marker: { color: c[colour], line: { width: 0 } }, hovertemplate: '%{y}', visible: y.some(Boolean) };
    }),
    layout: { barmode: 'stack', bargap: 0.45, showlegend: true, margin: { l: 30, r: 6, t: 28, b: 24 }, xaxis: { type: 'category' }, yaxis: { rangemode: 'tozero', tickformat: ',d', nticks: 4 } },
  })).catch((error) => console.warn(error.message));
  const all = week.admissions.filter((one) => one.started_at !== null).map((one) => Math.max(0.5, one.started_at - one.submitted_at));
  const least = Math.min(1, ...all);
  const most = Math.max(10, ...all);
  const waits = group(week.admissions.filter((one) => one.started_at !== null), (one) => one.dag_id);
  draw('chart-waits', (c) => ({
    data: [...waits].slice(0, MANY_DAGS).map(([dag, all]) => ({
      type: 'box', orientation: 'h', name: dag, x: all.map((one) => Math.max(0.5, one.started_at - one.submitted_at)), y: all.map(() => dag), boxpoints: 'all', jitter: 0.5, pointpos: 0,
      marker: { size: 3.5, color: c.muted, opacity: 0.7 }, line: { width: 1.4, color: c.accent }, fillcolor: c.soft, hovertemplate: '%{x:.0f} s<extra></extra>',
    })),
    layout: { hovermode: 'closest', margin: { l: 30, r: 10, t: 28, b: 24 }, xaxis: { type: 'log', range: [Math.log10(least / 1.6), Math.log10(most * 1.6)], tickvals: WAITS, ticktext: WAITS.map(f.duration) }, yaxis: { type: 'category' } },
  })).catch((error) => console.warn(error.message));
}
