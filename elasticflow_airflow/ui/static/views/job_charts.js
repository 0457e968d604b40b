// The charts of one job: its course, its scaling curve, and its last runs.

import { draw } from '../charts.js';
import { moment, nowS, wall } from '../format.js';

const tell = (error) => console.warn(error.message);

/** Workers as steps: [time, workers] pairs, back to none where a span ends and no other begins. */
function steps(spans, now) {
  const x = [];
  const y = [];
  const sorted = [...spans].sort((a, b) => a.from_at - b.from_at);
  sorted.forEach((span, at) => {
    const until = span.until_at ?? now;
    x.push(wall(span.from_at), wall(until));
    y.push(span.workers, span.workers);
    const next = sorted[at + 1];
    if (span.until_at !== null && (!next || next.from_at > until + 1)) {
      x.push(wall(until));
      y.push(0);
    }
  });
  return { x, y };
}

export function drawStory({ status, generations, planned, samples }) {
  const now = nowS();
  const stamp = JSON.stringify([generations, planned, samples.length, samples.at(-1), status.deadline_at, Math.floor(now / 20)]);
  draw('chart-story', (c) => {
    const losses = samples.filter((one) => one.loss !== null);
    const times = [...generations.map((one) => one.from_at), ...samples.map((one) => one.at)];
    const first = Math.min(status.submitted_at, ...times);
    const last = Math.max(first + 60, ...[...generations, ...planned].map((one) => one.until_at ?? now), ...samples.map((one) => one.at), status.deadline_at && status.deadline_at < now + 3 * (now - first) ? status.deadline_at : 0);
    const span = (last - first) * 0.02;
    const line = (at, colour, dash) => ({ type: 'line', xref: 'x', yref: 'paper', x0: wall(at), x1: wall(at), y0: 0, y1: 1, line: { color: colour, width: 1.3, dash } });
    const shapes = [];
    const annotations = [];
    const note = (at, text, colour) => annotations.push({ x: wall(at), y: 1.0, xref: 'x', yref: 'paper', text, showarrow: false, font: { size: 11, color: colour }, xanchor: at > first + 0.7 * (last - first) ? 'right' : 'left', yanchor: 'bottom', xshift: at > first + 0.7 * (last - first) ? -3 : 3 });
    if (status.deadline_at && status.deadline_at <= last) {
      shapes.push(line(status.deadline_at, c.bad, 'solid'));
      note(status.deadline_at, 'deadline', c.bad);
    }
    if (now < last && planned.length) {
      shapes.push(line(now, c.muted, 'dot'));
      note(now, 'now', c.muted);
    }
    if (status.target_loss !== null) shapes.push({ type: 'line', xref: 'paper', yref: 'y2', x0: 0, x1: 1, y0: status.target_loss, y1: status.target_loss, line: { color: c.ok, width: 1.2, dash: 'dash' } });
    return {
      data: [
        { ...steps(generations, now), name: 'workers', mode: 'lines', fill: 'tozeroy', fillcolor: c.soft, line: { color: c.accent, width: 1.8, shape: 'hv' }, yaxis: 'y', hovertemplate: '%{y} workers<extra></extra>' },
        { ...steps(planned, now), name: 'planned', mode: 'lines', line: { color: c.accent, width: 1.6, dash: 'dot', shape: 'hv' }, yaxis: 'y', hovertemplate: '%{y} planned<extra></extra>', hoverinfo: 'skip' },
        { x: losses.map((one) => wall(one.at)), y: losses.map((one) => one.loss), name: 'loss', mode: 'lines', line: { color: c.accent, width: 1.8 }, yaxis: 'y2', hovertemplate: 'loss %{y:.4g}<extra></extra>' },
        { x: samples.map((one) => wall(one.at)), y: samples.map((one) => one.steps_per_s), name: 'steps/s', mode: 'lines', line: { color: c.accent, width: 1.8 }, yaxis: 'y3', hovertemplate: '%{y:.3g} steps/s<extra></extra>' },
      ],
      layout: {
        margin: { l: 52, r: 14, t: 22, b: 30 }, shapes, annotations,
        xaxis: { type: 'date', range: [wall(first - span), wall(last + span)], anchor: 'y3', domain: [0, 1] },
        yaxis: { domain: [0.7, 1], title: 'workers', rangemode: 'tozero', dtick: Math.max(1, Math.ceil(Math.max(1, ...[...generations, ...planned].map((one) => one.workers)) / 3)) },
        yaxis2: { domain: [0.36, 0.63], title: 'loss', nticks: 4 },
        yaxis3: { domain: [0, 0.28], title: 'steps/s', rangemode: 'tozero', nticks: 4 },
      },
    };
  }, stamp).catch(tell);
}

export function drawCurve({ curve, status }) {
  if (!curve.length) return;
  draw('chart-curve', (c) => {
    const x = curve.map((point) => point.workers);
    const base = curve.find((point) => point.reckoned_steps_per_s ?? point.measured_steps_per_s);
    const one = base ? (base.reckoned_steps_per_s ?? base.measured_steps_per_s) / base.workers : null;
    const now = curve.find((point) => point.workers === status.workers);
    const at = now ? (now.measured_steps_per_s ?? now.reckoned_steps_per_s) : null;
    return {
      data: [
        { x, y: x.map((workers) => (one === null ? null : workers * one)), name: 'linear', mode: 'lines', line: { color: c.muted, width: 1.2, dash: 'dot' }, hoverinfo: 'skip' },
        { x, y: curve.map((point) => point.reckoned_steps_per_s), name: 'assumed', mode: 'lines', line: { color: c.accent, width: 1.8 }, hovertemplate: '%{y:.3g} assumed<extra></extra>' },
        { x, y: curve.map((point) => point.measured_steps_per_s), name: 'measured', mode: 'markers', marker: { color: c.accent, size: 9, line: { color: c.card, width: 1.5 } }, hovertemplate: '%{y:.3g} measured<extra></extra>' },
        { x: at === null ? [] : [status.workers], y: at === null ? [] : [at], name: 'now', mode: 'markers', marker: { color: 'rgba(0,0,0,0)', size: 17, line: { color: c.accent, width: 1.6 } }, hoverinfo: 'skip' },
      ],
      layout: { showlegend: true, margin: { l: 48, r: 12, t: 28, b: 38 }, xaxis: { type: 'log', tickvals: x, ticktext: x.map(String), title: 'workers' }, yaxis: { type: 'log', title: 'steps/s', dtick: 'D2' } },
    };
  }, JSON.stringify([curve, status.workers])).catch(tell);
}

export const runKey = (run) => `${run.job_id}-${run.incarnation}`;

/** This run among the last ones; with a run to compare with, only these two. */
export function drawRuns(runs, status, beside) {
  if (runs.length < 2) return;
  const isThis = (run) => runKey(run) === runKey(status);
  if (!runs.some((run) => runKey(run) === beside)) beside = '';
  const shown = runs.filter((run) => !beside || isThis(run) || runKey(run) === beside);
  draw('chart-runs', (c) => ({
    data: shown.sort((a, b) => Number(isThis(a)) - Number(isThis(b))).map((run) => {
      const known = run.samples.filter((one) => one.loss !== null);
      const line = isThis(run) ? { color: c.accent, width: 2.4 } : { color: beside ? c.warn : c.muted, width: beside ? 2 : 1 };
      return { x: known.map((one) => one.at / 60), y: known.map((one) => one.loss), name: isThis(run) ? 'this run' : moment(run.submitted_at), mode: 'lines', line, opacity: isThis(run) || beside ? 1 : 0.5, hovertemplate: '%{y:.4g}' };
    }),
    layout: { hovermode: 'closest', showlegend: Boolean(beside), margin: { l: 48, r: 12, t: beside ? 28 : 10, b: 38 }, xaxis: { title: 'minutes since the start', rangemode: 'tozero' }, yaxis: { title: 'loss', nticks: 5 } },
  }), JSON.stringify([beside, runs.map((run) => [run.job_id, run.samples.length])])).catch(tell);
}
