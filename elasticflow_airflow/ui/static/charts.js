// Line and bar charts by plotly, which is loaded when the first chart is wanted, in the page's own colours.

import { h } from './dom.js';
import { onChange, token } from './theme.js';

let address = null;
let loading = null;
const drawn = new Map();
const stamps = new WeakMap();

export const useLibrary = (from) => {
  address = from;
};

function library() {
  loading ??= new Promise((ready, failed) => {
    const script = h('script', { src: address });
    script.addEventListener('load', () => ready(window.Plotly));
    script.addEventListener('error', () => {
      loading = null;
      failed(new Error('the charts could not be loaded'));
    });
    document.head.append(script);
  });
  return loading;
}

export const colours = () => ({
  accent: token('accent'), soft: token('accent-soft'), muted: token('muted'), border: token('border'), text: token('text'),
  ok: token('ok'), warn: token('warn'), bad: token('bad'), card: token('card'), faint: token('faint'),
});

function layoutFor(wanted) {
  const c = colours();
  const axis = (given) => ({
    gridcolor: c.border, linecolor: c.border, zeroline: false, tickcolor: c.border, automargin: true, fixedrange: false,
    ticks: '', tickfont: { size: 11, color: c.muted }, ...given,
    title: given.title ? { text: given.title, font: { size: 11, color: c.muted }, standoff: 10 } : undefined,
  });
  const made = {
    paper_bgcolor: 'rgba(0,0,0,0)', plot_bgcolor: 'rgba(0,0,0,0)',
    font: { family: getComputedStyle(document.body).fontFamily, size: 12, color: c.text },
    margin: { l: 44, r: 12, t: 10, b: 30 }, hovermode: 'x unified', showlegend: false,
    hoverlabel: { bgcolor: c.card, bordercolor: c.border, font: { color: c.text, size: 12 } },
    legend: { orientation: 'h', y: 1.02, yanchor: 'bottom', x: 0, font: { size: 11, color: c.muted } },
    ...wanted,
  };
  for (const name of Object.keys(made)) if (/^[xy]axis\d*$/.test(name)) made[name] = axis(made[name]);
  made.xaxis ??= axis({});
  made.yaxis ??= axis({});
  return made;
}

/** A place for a chart. `label` says in words what it shows; the numbers themselves stand in a table beside it. */
export const place = (id, label, height = 240) =>
  h('div', { id, class: 'chart', 'data-keep': '', 'data-key': id, role: 'img', 'aria-label': label, style: { 'min-height': `${height}px` } });

/** Draw in the place of that id, or draw anew. `make(colours)` returns {data, layout}; an equal stamp means no news. */
export async function draw(id, make, stamp = null) {
  const into = document.getElementById(id);
  if (!into || (stamp !== null && into.data && stamps.get(into) === stamp)) return;
  drawn.set(id, make);
  const plotly = await library();
  if (!into.isConnected) return;
  stamps.set(into, stamp);
  const { data, layout } = make(colours());
  await plotly.react(into, data, { ...layoutFor(layout), height: into.clientHeight || undefined, uirevision: id }, { displayModeBar: false, responsive: true, doubleClick: 'reset', locale: 'en' });
}

/** Every chart inside an element as an SVG picture, by its id: for a file that needs no script. */
export async function pictures(root) {
  const found = new Map();
  for (const chart of root.querySelectorAll('.chart')) {
    if (!chart.data) continue;
    const { width, height } = chart.getBoundingClientRect();
    found.set(chart.id, await window.Plotly.toImage(chart, { format: 'svg', width: Math.max(320, width), height: Math.max(160, height) }));
  }
  return found;
}

onChange(() => {
  for (const [id, make] of drawn) {
    if (document.getElementById(id)) draw(id, make).catch((error) => console.warn(error.message));
    else drawn.delete(id);
  }
});
