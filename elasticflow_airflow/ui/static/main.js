// Starts the page: which view the address names, and where to show what went wrong.

import * as api from './api.js';
import { Changes } from './changes.js';
import { useLibrary } from './charts.js';
import { h, show } from './dom.js';
import { outdate } from './feed.js';
import { nowS } from './format.js';
import { Live } from './live.js';
import { failure, openOutside } from './parts.js';
import { follow, paint } from './theme.js';
import { listenForTips } from './tips.js';
import * as clusterView from './views/cluster.js';
import * as jobView from './views/job.js';
import * as jobsView from './views/jobs.js';
import * as whatIfView from './views/whatif.js';

const views = { cluster: clusterView, jobs: jobsView, job: jobView, 'what-if': whatIfView };
/** How often a view asks that hears of every event: how far jobs are is no event. */
const BESIDE_EVENTS_MS = 10000;
const pulse = document.getElementById('pulse');
let main = document.getElementById('view');
let live = null;
let view = null;
let changes = null;
let shownAt = null;

/** Which DAG run or task this page was opened for: Airflow's tabs say it in the query. */
function context() {
  const query = new URLSearchParams(location.search);
  const told = {};
  for (const name of ['dag_id', 'run_id', 'task_id', 'map_index']) {
    const value = query.get(name);
    if (value && !value.startsWith('{')) told[name] = value; // Airflow leaves {MAP_INDEX} where there is none.
  }
  return told;
}

function route() {
  const [name, ...rest] = location.hash.replace(/^#\/?/, '').split('?')[0].split('/').map(decodeURIComponent);
  if (views[name]) return [name, rest];
  const { dag_id: dag } = context();
  return [dag ? 'jobs' : 'cluster', []];
}

function beat(error) {
  if (error && ![403, 404].includes(error.status)) { // Those are answers.
    pulse.className = 'pulse away';
    pulse.textContent = 'Not connected';
  } else {
    shownAt = nowS();
    pulse.className = 'pulse';
    pulse.textContent = 'Live';
  }
}

function open() {
  live?.stop();
  view?.close?.();
  const [name, rest] = route();
  const fresh = h('main', { id: 'view', tabindex: '-1', 'aria-busy': 'true', 'data-view': name }, h('p', { class: 'loading' }, 'Loading…'));
  main.replaceWith(fresh);
  main = fresh;
  for (const link of document.querySelectorAll('nav [data-view]')) {
    const here = link.dataset.view === name || (name === 'job' && link.dataset.view === 'jobs');
    if (here) link.setAttribute('aria-current', 'page');
    else link.removeAttribute('aria-current');
  }
  view = views[name].open({ main: fresh, rest, context: context(), refresh: () => live.soon() });
  document.title = `${view.title} – ElasticFlow`;
  live = new Live(
    async (signal) => {
      await view.look(signal);
      if (fresh !== main) return;
      fresh.setAttribute('aria-busy', 'false');
      beat(null);
    },
    () => (changes?.follows && !view.steady ? BESIDE_EVENTS_MS : view.everyMs),
    (error) => {
      if (fresh !== main) return;
      console.warn(`ElasticFlow: ${error.message}`);
      fresh.setAttribute('aria-busy', 'false');
      beat(error);
      // What is shown stays for a moment of absence; what was never shown, or is gone, says why.
      if (!view.hasShown || [401, 403, 404].includes(error.status) || live.failures > 2) {
        view.hasShown = false;
        show(fresh, failure(error));
      }
    },
  );
  remember();
}

/** Airflow's address bar keeps our view too, so that a reload or a copied link comes back to it. */
function remember() {
  try {
    if (window.parent === window || !window.parent.location.pathname.includes('/plugin/')) return;
    const outer = new URL(window.parent.location.href);
    if (outer.hash === location.hash) return;
    outer.hash = location.hash;
    window.parent.history.replaceState(window.parent.history.state, '', outer);
  } catch {
    // Framed by another site: nothing to remember there.
  }
}

document.addEventListener('click', (event) => {
  const target = event.target.closest('[data-action], [data-outside]');
  if (!target) return;
  if (target.dataset.outside !== undefined) {
    event.preventDefault();
    openOutside(target.href);
  } else if (target.dataset.action === 'skip') {
    event.preventDefault();
    main.focus();
  } else if (target.dataset.action === 'reload') {
    event.preventDefault();
    openOutside(new URL('../', document.baseURI).href);
  } else {
    view?.act?.(target.dataset.action, target, event);
  }
});
for (const kind of ['input', 'change']) {
  document.addEventListener(kind, (event) => {
    const target = event.target.closest(`[data-${kind}]`);
    if (target) view?.act?.(target.dataset[kind], target, event);
  });
}
window.addEventListener('hashchange', () => {
  open();
  main.focus({ preventScroll: true });
  scrollTo(0, 0);
});
setInterval(() => {
  if (shownAt !== null && nowS() - shownAt > 60 && !document.hidden) pulse.textContent = 'Out of date';
}, 15000);

follow();
listenForTips();
try {
  const me = await api.me();
  useLibrary(me.chart_library);
  if (me.brand) paint(me.brand);
  open();
  changes = new Changes(() => {
    outdate();
    if (!view.steady) live.soon();
  });
} catch (error) {
  main.setAttribute('aria-busy', 'false');
  show(main, failure(error));
}
