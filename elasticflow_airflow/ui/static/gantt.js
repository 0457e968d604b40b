// Jobs on slots over time: what was (solid), what is planned (hatched), submissions and deadlines above, use below.

import { h, s } from './dom.js';
import * as f from './format.js';
import { colourOf } from './palette.js';
import { isInDoubt, jobLink } from './parts.js';

const ROW = 20;
const GAP = 3;
const NODE_GAP = 9;
const LANE = 22;
const AXIS = 24;
const USE = 54;
const FOLDED_PX = 620; // All nodes together, where each is folded to one lane.
const ROWS_UNFOLDED = 32;
const LEGIBLE = 13; // A lower bar has no room for letters.
const STEPS = [60, 300, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];

/** The slots as rows: {key, node, index, y, tall}; with their whole height. Of a folded node, a row is a thin part of its lane. */
function rowsOf(slots, spans, top, unfolded) {
  const known = new Map();
  const add = (node, index) => known.set(`${node}:${index}`, { key: `${node}:${index}`, node, index });
  for (const slot of slots) add(slot.node_id, slot.index);
  for (const span of spans) for (const [node, index] of span.slots) add(node, index);
  const rows = [...known.values()].sort((a, b) => a.node.localeCompare(b.node, undefined, { numeric: true }) || a.index - b.index);
  const sizes = new Map();
  for (const { node } of rows) sizes.set(node, (sizes.get(node) ?? 0) + 1);
  const folds = rows.length > ROWS_UNFOLDED;
  const lane = Math.max(8, Math.min(ROW, Math.floor(FOLDED_PX / Math.max(1, sizes.size)) - 2));
  let y = top;
  rows.forEach((row, at) => {
    const folded = folds && !unfolded.has(row.node);
    const first = rows[at - 1]?.node !== row.node;
    if (at > 0 && first) y += folded ? 2 : NODE_GAP;
    Object.assign(row, { at, y, folded, first, lane, tall: folded ? lane / sizes.get(row.node) : ROW, foldable: folds });
    y += row.tall + (folded ? 0 : GAP);
  });
  return { rows, bottom: y };
}

/** Give planned segments without settled slots rows that are free then: first those that the job has already. */
function settle(planned, held, rows) {
  const taken = new Map(rows.map((row) => [row.key, []]));
  const last = new Map();
  const take = (key, from, until) => taken.get(key)?.push([from, until]);
  for (const span of held) {
    for (const [node, index] of span.slots) take(`${node}:${index}`, span.from_at, span.until_at);
    last.set(span.job_id, span.slots.map(([node, index]) => `${node}:${index}`));
  }
  const free = (key, from, until) => taken.get(key).every(([a, b]) => b <= from + 1 || a >= until - 1);
  const settled = [...planned].sort((a, b) => a.from_at - b.from_at).map((span) => {
    if (span.slots.length || span.until_at === null) return span;
    const order = [...(last.get(span.job_id) ?? []), ...rows.map((row) => row.key)].filter((key, at, all) => taken.has(key) && all.indexOf(key) === at);
    const chosen = order.filter((key) => free(key, span.from_at, span.until_at)).slice(0, span.workers);
    for (const key of chosen) take(key, span.from_at, span.until_at);
    if (chosen.length) last.set(span.job_id, chosen);
    const byKey = new Map(rows.map((row) => [row.key, row]));
    return { ...span, slots: chosen.map((key) => [byKey.get(key).node, byKey.get(key).index]) };
  });
  return settled;
}

/** Neighbouring rows of a span as one block: [[first, last], ...]. */
function blocks(span, byKey) {
  const at = span.slots.map(([node, index]) => byKey.get(`${node}:${index}`)).filter(Boolean).sort((a, b) => a.at - b.at);
  const made = [];
  for (const row of at) {
    const open = made.at(-1);
    if (open && open[1].at + 1 === row.at && open[1].node === row.node) open[1] = row;
    else made.push([row, row]);
  }
  return made;
}

/** The name of a slot, or of its node where that is folded; nodes of a large cluster are folded and unfolded by it. */
function rowName(row, left) {
  const small = row.folded && row.lane < LEGIBLE;
  const at = { x: left - 8, y: row.y + (row.folded ? row.lane / 2 + (small ? 3 : 4) : ROW - 6), class: 'slot', 'text-anchor': 'end', style: small ? { 'font-size': '9px' } : null };
  if (!row.first) return row.folded ? null : s('text', { ...at, 'aria-hidden': 'true' }, String(row.index));
  const node = shorten(row.node, left - (row.folded ? 16 : 26));
  if (!row.foldable) return s('text', { ...at, 'aria-hidden': 'true' }, `${node} ${row.index}`);
  const text = row.folded ? `${node} ▸` : `${node} ▾ ${row.index}`;
  return s('g', { role: 'button', tabindex: -1, class: 'fold-node', 'data-action': 'fold', 'data-node': row.node, 'data-key': `fold-${row.node}`, 'aria-expanded': String(!row.folded), 'aria-label': `${row.node}: its slots one by one` }, s('text', at, text));
}

const shorten = (text, width) => {
  const letters = Math.floor((width - 10) / 6.6);
  if (letters < 5 && letters < text.length) return '';
  return text.length <= letters ? text : `${text.slice(0, letters - 1)}…`;
};

const barName = (span, width) => {
  const long = `${span.dag_id} · ${span.task_id}`;
  return shorten(long, width) === long ? long : shorten(span.dag_id, width);
};

function ticks(from, until, width) {
  const step = STEPS.find((one) => (width * one) / (until - from) >= (one >= 86400 ? 84 : 56)) ?? 86400;
  const midnight = new Date(from * 1000);
  midnight.setHours(0, 0, 0, 0);
  const made = [];
  for (let at = midnight.getTime() / 1000; at <= until; at += step) if (at >= from) made.push(at);
  return made.map((at) => [at, new Date(at * 1000).getHours() === 0 && new Date(at * 1000).getMinutes() === 0 ? f.onDay(at) : f.hour(at)]);
}

const hatch = (colour) =>
  s('pattern', { id: `hatch-${colour}`, width: 6, height: 6, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
    s('rect', { width: 6, height: 6, class: `block c${colour}`, 'fill-opacity': 0.16 }),
    s('rect', { width: 2, height: 6, class: `block c${colour}`, 'fill-opacity': 0.62 }));

function describe(span, planned, now) {
  const name = span.job_id ? `${span.dag_id} · ${span.task_id}${span.map_index >= 0 ? ` [${span.map_index}]` : ''}` : 'Another job';
  const until = span.until_at === null ? 'now' : f.moment(span.until_at, span.from_at);
  const lines = [name, `${f.plural(span.workers, 'slot')}, ${planned ? 'planned ' : ''}${f.moment(span.from_at, now)} – ${until}`];
  if (span.job_id) {
    lines.push(`run ${span.run_id}`);
    const starting = span.running_at ? span.running_at - span.from_at : 0;
    if (starting >= 1) lines.push(`${f.duration(starting)} to start`);
    if (span.pause_s >= 1) lines.push(`${f.duration(span.pause_s)} paused`);
    if (span.reason) lines.push(f.sentence(span.reason));
  }
  return lines;
}

/** The picture. `history` and `cluster` as the service tells them; `width` in pixels. */
export function gantt({ history, cluster, width, from, until, unfolded }) {
  const { now } = history;
  const left = width < 600 ? 74 : 118;
  const right = 10;
  const inner = Math.max(100, width - left - right);
  const x = (at) => left + (inner * (Math.min(until, Math.max(from, at)) - from)) / (until - from);
  const held = history.spans.filter((span) => (span.until_at ?? now) > from).map((span) => ({ ...span, until_at: span.until_at ?? now }));
  const top = AXIS + 2 * LANE + 4;
  const { rows, bottom } = rowsOf(cluster.slots, [...held, ...history.planned], top, unfolded);
  const byKey = new Map(rows.map((row) => [row.key, row]));
  const planned = settle(history.planned, held, rows);
  const useTop = bottom + 12;
  const height = useTop + USE + 6;
  const at = ticks(from, until, inner);

  const grid = at.map(([when, text]) => [
    s('line', { x1: x(when), x2: x(when), y1: AXIS - 4, y2: height - 6, class: 'grid' }),
    s('text', { x: x(when) + 4, y: AXIS - 10, class: 'tick' }, x(when) > left + inner - 40 ? '' : text),
  ]);
  const names = rows.map((row) => rowName(row, left));
  const beds = rows.map((row) => s('rect', { x: left, y: row.y, width: inner, height: row.tall, class: 'bed' }));

  const bars = [];
  const draw = (span, isPlan) => {
    const colour = span.job_id ? colourOf(span.dag_id) : 'x';
    const lines = describe(span, isPlan, now);
    const a = x(span.from_at);
    const b = Math.max(a + 2, x(span.until_at));
    const started = span.running_at && !isPlan ? Math.min(b, Math.max(a, x(span.running_at))) : a;
    for (const [first, last] of blocks(span, byKey)) {
      const tall = last.y + last.tall - first.y;
      const inside = [
        s('rect', { x: a, y: first.y, width: b - a, height: tall, rx: Math.min(4, tall / 3), class: `block c${colour}`, style: isPlan ? `fill: url(#hatch-${colour})` : null }),
      ];
      if (started > a + 0.5) inside.push(s('rect', { x: a, y: first.y, width: started - a, height: tall, rx: 4, class: 'starting' }));
      const text = span.job_id && tall >= LEGIBLE ? barName(span, b - a) : '';
      if (text) inside.push(s('text', { x: a + 7, y: first.y + tall / 2 + 4, class: isPlan ? 'on-plan' : 'on-bar' }, text));
      const shared = { 'data-tip': lines.join('\n'), 'aria-label': lines.join(', '), 'data-key': `${isPlan ? 'p' : 'h'}${span.job_id}${span.from_at}${first.key}` };
      bars.push(span.job_id
        ? s('a', { href: jobLink(span, span.job_id), class: 'bar', tabindex: -1, ...shared }, inside)
        : s('g', { role: 'img', ...shared }, inside));
    }
  };
  for (const span of held) draw(span, false);
  for (const span of planned) if (span.until_at > from && span.from_at < until) draw(span, true);
  const first = bars.find((bar) => bar.nodeName === 'a');
  if (first) first.setAttribute('tabindex', 0);
  names.find((name) => name?.nodeName === 'g')?.setAttribute('tabindex', 0);

  const marks = lanes({ history, cluster, x, from, until, now, byKey, spans: [...held, ...planned] });
  const nowLine = now >= from && now <= until
    ? [s('line', { x1: x(now), x2: x(now), y1: AXIS - 4, y2: height - 6, class: 'now' }), s('text', { x: x(now) + 4, y: height - 9, class: 'now-text' }, 'now')]
    : [];

  return s('svg', { width, height, viewBox: `0 0 ${width} ${height}`, class: 'gantt', 'data-left': left, 'data-inner': inner, role: 'group', 'aria-label': `Jobs on slots from ${f.moment(from)} to ${f.moment(until)}. Arrow keys go from job to job; plus and minus zoom, Shift and arrow keys move the time.`, 'data-key': 'gantt' },
    s('defs', {}, [0, 1, 2, 3, 4, 5, 6, 7, 'x'].map(hatch)),
    s('g', { class: 'names' }, names),
    s('g', { 'aria-hidden': 'true' }, beds, grid,
      s('text', { x: left - 8, y: AXIS + 15, class: 'slot', 'text-anchor': 'end' }, 'Submitted'),
      s('text', { x: left - 8, y: AXIS + LANE + 15, class: 'slot', 'text-anchor': 'end' }, 'Deadlines')),
    s('g', { class: 'marks' }, marks), s('g', { class: 'bars' }, bars),
    s('g', { 'aria-hidden': 'true' }, use(history, x, useTop, left), nowLine));
}

function lanes({ history, cluster, x, from, until, now, byKey, spans }) {
  const made = [];
  const inside = (at) => at !== null && at !== undefined && at >= from && at <= until;
  const tones = { admitted: 'ok', renegotiated: 'warn', rejected: 'bad', best_effort: 'quiet', undecided: 'quiet' };
  for (const one of history.admissions) {
    if (!inside(one.submitted_at)) continue;
    const px = x(one.submitted_at);
    const py = AXIS + 11;
    const lines = [`${one.dag_id} · ${one.task_id}`, `submitted ${f.moment(one.submitted_at, now)}: ${one.decision.replace('_', ' ')}`, f.sentence(one.reason)].filter(Boolean);
    made.push(s('g', { role: 'img', 'data-tip': lines.join('\n'), 'aria-label': lines.join(', '), class: `mark ${tones[one.decision]}` },
      one.decision === 'rejected'
        ? s('path', { d: `M${px - 4} ${py - 4}l8 8m0 -8l-8 8`, class: 'cross' })
        : s('circle', { cx: px, cy: py, r: 3.6 })));
  }
  const due = new Map();
  for (const one of history.admissions) {
    if (one.deadline_at !== null && one.decision !== 'rejected') due.set(one.job_id, { ...one, tone: one.met === false ? 'bad' : one.met ? 'ok' : 'quiet' });
  }
  for (const job of cluster.jobs) {
    if (job.deadline_at === null) continue;
    due.set(job.job_id, { ...job.identity, job_id: job.job_id, deadline_at: job.deadline_at, tone: isInDoubt(job) ? 'bad' : 'ok', projected_at: job.projected_finish_at });
  }
  for (const one of due.values()) {
    if (!inside(one.deadline_at)) continue;
    const px = x(one.deadline_at);
    const py = AXIS + LANE + 11;
    const last = spans.filter((span) => span.job_id === one.job_id && (span.slots.length > 0)).at(-1);
    const bottomOf = (row) => (row ? row.y + row.tall : 0);
    const under = last ? Math.max(...last.slots.map(([node, index]) => bottomOf(byKey.get(`${node}:${index}`)))) : py + 8;
    const over = last ? Math.min(...last.slots.map(([node, index]) => byKey.get(`${node}:${index}`)?.y ?? under)) : under;
    const finish = one.projected_at ?? one.finished_at;
    const lines = [`${one.dag_id} · ${one.task_id}`, `deadline ${f.moment(one.deadline_at, now)}`];
    if (finish) lines.push(`${one.projected_at ? 'projected finish' : 'finished'} ${f.moment(finish, now)}`);
    made.push(s('g', { role: 'img', 'data-tip': lines.join('\n'), 'aria-label': lines.join(', '), class: `mark ${one.tone}` },
      s('line', { x1: px, x2: px, y1: over, y2: under, class: 'due-line' }),
      s('path', { d: `M${px} ${py + 6}l-5 -9h10z` })));
  }
  return made;
}

/** How many slots were held, and how many of them computed. */
function use(history, x, top, left) {
  const { part_s: part, held_slot_s: held, computing_slot_s: computing, from_at: from, now } = history;
  const slots = Math.max(1, history.slots);
  const parts = held.map((_, at) => at).filter((at) => from + at * part < now);
  const y = (slotS, at) => {
    const lasted = Math.min(part, Math.max(1, now - (from + at * part)));
    return top + USE - (USE * Math.min(slots, slotS / lasted)) / slots;
  };
  const area = (values) => {
    if (!parts.length) return '';
    const points = parts.map((at) => `${x(from + at * part).toFixed(1)} ${y(values[at], at).toFixed(1)}H${x(Math.min(now, from + (at + 1) * part)).toFixed(1)}`);
    return `M${x(from + parts[0] * part)} ${top + USE}L${points.join('L')}V${top + USE}Z`;
  };
  return [
    s('rect', { x: left, y: top, width: x(history.until_at) - left, height: USE, class: 'bed' }),
    s('path', { d: area(held), class: 'use-held' }),
    s('path', { d: area(computing), class: 'use-computing' }),
    s('text', { x: left - 8, y: top + 14, class: 'slot', 'text-anchor': 'end' }, 'In use'),
    s('text', { x: left - 8, y: top + 29, class: 'slot faint', 'text-anchor': 'end' }, `of ${history.slots}`),
  ];
}

/** Arrow keys go from bar to bar, or from node to node; Enter and Space fold and unfold a node. */
export function walk(event) {
  const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
  const here = event.target.closest?.('a.bar, .fold-node');
  if (here?.dataset.action && ['Enter', ' '].includes(event.key)) {
    event.preventDefault();
    here.dispatchEvent(new MouseEvent('click', { bubbles: true }));
    return;
  }
  if (!step || !here || event.shiftKey) return;
  const all = [...here.closest('svg').querySelectorAll(here.dataset.action ? '.fold-node' : 'a.bar')];
  const next = all[all.indexOf(here) + step];
  if (!next) return;
  event.preventDefault();
  here.setAttribute('tabindex', '-1');
  next.setAttribute('tabindex', '0');
  next.focus();
}

/** What the colours and patterns mean, with the DAGs that are in the picture. */
export function legend(history) {
  const dags = [...new Set([...history.spans, ...history.planned].filter((span) => span.job_id).map((span) => span.dag_id))];
  const others = history.spans.some((span) => !span.job_id);
  const key = (kind, text) => h('li', {}, h('span', { class: `swatch ${kind}`, 'aria-hidden': 'true' }), text);
  const mark = (shape, text) => h('li', {}, s('svg', { class: 'key-mark', width: 12, height: 12, viewBox: '-6 -6 12 12', 'aria-hidden': 'true' }, s('g', { class: 'mark quiet' }, shape)), text);
  const refused = history.admissions.some((one) => one.decision === 'rejected');
  return h('ul', { class: 'legend' },
    dags.slice(0, 8).map((dag) => key(`c${colourOf(dag)}`, dag)),
    dags.length > 8 ? h('li', {}, `and ${dags.length - 8} more DAGs, in the same colours`) : null,
    others ? key('cx', 'other jobs') : null,
    key('planned', 'planned'), key('starting', 'starting'), key('held', 'held'), key('computing', 'computing'),
    history.admissions.length ? mark(s('circle', { r: 3.6 }), 'submitted') : null,
    refused ? mark(s('path', { d: 'M-4 -4l8 8m0 -8l-8 8', class: 'cross' }), 'rejected') : null,
    history.admissions.length ? mark(s('path', { d: 'M0 5l-5 -9h10z' }), 'deadline') : null);
}
