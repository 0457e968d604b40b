// What if: move deadlines or change the cluster, and see which promises would hold. Nothing is changed until you say so.

import * as api from '../api.js';
import { h, say, show } from '../dom.js';
import * as f from '../format.js';
import { card, chip, confirmed, decisionChip, empty, firstJob, fold, isLive, jobLink, jobName, noted, outcomeChip, shortName, slackChip, table, time } from '../parts.js';

const PAUSE_MS = 350;
const MANY = 8;
const DRAG_STEP_S = 300;
const [LEAST_SHOWN_S, FINE_S] = [6 * 3600, 48 * 3600];
const EXTRA_TO_DRAG = 16;

export function open({ main, refresh }) {
  const wanted = { deadlines: new Map(), extra: 0, without: new Set() };
  const got = { cluster: null, answer: null, error: null, asking: false, note: null, filter: '' };
  let timer = null;
  let aborter = null;

  async function look(signal) {
    got.cluster = await api.cluster(signal);
    if (!got.answer && !got.asking && !got.error) ask().then(render);
    render();
  }

  const changed = () => wanted.deadlines.size > 0 || wanted.extra > 0 || wanted.without.size > 0;

  function askSoon() {
    clearTimeout(timer);
    timer = setTimeout(() => ask().then(render), PAUSE_MS);
    render();
  }

  async function ask() {
    aborter?.abort();
    aborter = new AbortController();
    const { signal } = aborter;
    got.asking = true;
    got.error = null;
    try {
      got.answer = await api.whatIf({
        hours: 24,
        changes: [...wanted.deadlines].map(([id, at]) => ({ job_id: id, deadline_at: at })),
        extra_nodes: wanted.extra,
        without_nodes: [...wanted.without],
      }, signal);
      if (changed()) say(f.whole(got.answer.after.summary));
    } catch (error) {
      if (error.name !== 'AbortError') got.error = error;
    }
    if (signal === aborter.signal) got.asking = false;
  }

  function render() {
    const { cluster } = got;
    if (!cluster) return;
    const jobs = cluster.jobs.filter(isLive).sort((a, b) => Number(b.job_id === first) - Number(a.job_id === first) || (a.deadline_at ?? Infinity) - (b.deadline_at ?? Infinity));
    show(main,
      h('div', { class: 'page-head' }, h('div', {}, h('h1', {}, 'What if'), h('p', { class: 'muted' }, 'Move a deadline, or add and remove nodes: the scheduler says what it could still promise. Nothing changes until you apply it.')),
        changed() ? h('button', { type: 'button', class: 'button', 'data-action': 'reset', 'data-key': 'reset' }, 'Start over') : null),
      got.note ? h('p', { class: `banner ${got.note.tone}`, role: 'status', 'data-key': 'note' }, got.note.text) : null,
      h('div', { class: 'columns', 'data-key': 'inputs' }, deadlines(jobs, cluster), capacity(cluster)),
      outcome());
    view.hasShown = true;
  }

  /** The time that the sliders span, the same for all, so that they can be compared: from now to after the last deadline. */
  function span(jobs) {
    const from = Math.floor(f.nowS() / DRAG_STEP_S) * DRAG_STEP_S;
    const last = Math.max(...jobs.flatMap((job) => [job.deadline_at ?? from, job.projected_finish_at ?? from]));
    const lengthS = Math.max(LEAST_SHOWN_S, 1.25 * (last - from));
    const step = DRAG_STEP_S * Math.ceil(lengthS / FINE_S);
    return { from, until: from + Math.ceil(lengthS / step) * step, step };
  }

  /** A deadline to drag, or to move by the arrow keys; the bar behind it ends where the job is projected to finish. */
  function slider(job, at, { from, until, step }) {
    const part = (moment) => `${(100 * Math.min(1, Math.max(0, (moment - from) / (until - from)))).toFixed(1)}%`;
    return h('input', { type: 'range', class: 'drag', min: from, max: until, step, value: from + Math.round((at - from) / step) * step, 'data-input': 'drag', 'data-job': job.job_id, 'data-key': `drag-${job.job_id}`,
      'aria-label': `Move the deadline of ${jobName(job.identity)}`, 'aria-valuetext': f.moment(at), 'data-tip': `deadline ${f.moment(at)}`, style: { '--finish': part(job.projected_finish_at ?? from) } });
  }

  /** A deadline that many minutes later, or earlier; one that has passed is moved from now on. */
  function shifted(job, minutes) {
    const at = wanted.deadlines.get(job.job_id) ?? job.deadline_at ?? job.projected_finish_at ?? f.nowS();
    return (minutes > 0 ? Math.max(at, f.nowS()) : at) + 60 * minutes;
  }

  /** A job as it would be with its moved deadline, now that the scheduler has answered. */
  function then(job, at) {
    const finish = got.answer.after.items.find((one) => one.job_id === job.job_id)?.projected_at ?? job.projected_finish_at;
    return { ...job, deadline_at: at, slack_s: at === null || finish === null ? null : at - finish };
  }

  const first = new URLSearchParams(location.hash.split('?')[1] ?? '').get('job'); // whose deadline somebody came for
  const named = (job) => jobName(job.identity).toLowerCase();
  const deadlines = (jobs, cluster, shown = span(jobs)) => card('Deadlines', jobs.length ? `Drag a deadline; the bars end where the jobs are projected to finish. ${f.moment(shown.from)} to ${f.moment(shown.until)}.` : null, jobs.length > MANY
    ? h('input', { type: 'search', class: 'input', placeholder: 'DAG or task', 'aria-label': 'Filter deadlines', 'data-input': 'filter', 'data-key': 'filter' }) : null,
  jobs.length
    ? h('ul', { class: `items moves${jobs.length > MANY ? ' scroll' : ''}`, tabindex: jobs.length > MANY ? 0 : null, 'aria-label': 'Deadlines of live jobs' }, jobs.filter((job) => wanted.deadlines.has(job.job_id) || named(job).includes(got.filter)).map((job) => {
        const moved = wanted.deadlines.has(job.job_id);
        const at = moved ? wanted.deadlines.get(job.job_id) : job.deadline_at;
        const verdict = moved ? got.answer?.verdicts.find((one) => one.job_id === job.job_id)?.verdict : null;
        const id = `at-${job.job_id}`;
        const button = (minutes, text) => h('button', { type: 'button', class: 'button small-button', disabled: shifted(job, minutes) < f.nowS(), 'data-action': 'shift', 'data-job': job.job_id, value: minutes, 'aria-label': `${jobName(job.identity)}: deadline ${Math.abs(minutes)} minutes ${minutes < 0 ? 'earlier' : 'later'}` }, text);
        return h('li', { 'data-key': job.job_id },
          h('div', { class: 'matter' }, shortName(job.identity, jobLink(job.identity, job.job_id)), ' ', h('span', { class: 'muted small nowrap' }, 'finish ', time(job.projected_finish_at)), ' ', slackChip(verdict ? then(job, at) : job)),
          h('div', { class: 'move' }, h('label', { class: 'visually-hidden', for: id }, `Deadline of ${jobName(job.identity)}`),
            button(-30, '−30 min'), h('input', { type: 'datetime-local', id, class: 'input', value: at === null ? '' : f.toInput(at), min: f.toInput(f.nowS() + 60), 'data-change': 'deadline', 'data-job': job.job_id, 'data-key': id }), button(30, '+30 min'),
            moved ? h('button', { type: 'button', class: 'button small-button', 'data-action': 'undo', 'data-job': job.job_id }, 'Undo') : null),
          at === null ? null : slider(job, at, shown),
          verdict ? h('div', { class: 'verdict' }, verdict.decision === 'rejected' ? chip('Refused', 'bad', '✕') : decisionChip(verdict.decision), h('span', { class: 'small' }, f.whole(verdict.reason)),
            verdict.decision === 'rejected' && verdict.earliest_deadline_at ? h('button', { type: 'button', class: 'button small-button', 'data-action': 'earliest', 'data-job': job.job_id, value: verdict.earliest_deadline_at }, `Try ${f.moment(verdict.earliest_deadline_at + 60)}`) : null,
            verdict.decision !== 'rejected' && cluster.may_edit.includes(job.identity.dag_id) ? h('button', { type: 'button', class: 'button small-button primary', 'data-action': 'apply', 'data-job': job.job_id }, 'Apply') : null) : null);
      }))
    : empty('No job is live', firstJob()));

  function capacity(cluster) {
    const nodes = [...new Set(cluster.slots.map((slot) => slot.node_id))].sort((a, b) => a.localeCompare(b, undefined, { numeric: true }));
    const largest = Math.max(0, ...nodes.map((node) => cluster.slots.filter((slot) => slot.node_id === node).length));
    return card('Capacity', null,
      h('div', { class: 'stepper' }, h('span', { id: 'more-label' }, 'More nodes', h('span', { class: 'muted small' }, ` of ${f.plural(largest, 'slot')} each`)),
        h('span', { role: 'group', 'aria-labelledby': 'more-label' }, h('button', { type: 'button', class: 'button small-button', 'data-action': 'fewer', 'aria-label': 'One node fewer', disabled: wanted.extra === 0 }, '−'),
          h('output', { 'aria-live': 'polite' }, String(wanted.extra)), h('input', { type: 'range', class: 'drag', min: 0, max: Math.max(EXTRA_TO_DRAG, wanted.extra), value: wanted.extra, 'aria-label': 'More nodes', 'data-input': 'extra', 'data-key': 'extra' }), h('button', { type: 'button', class: 'button small-button', 'data-action': 'more', 'aria-label': 'One node more' }, '+'))),
      h('fieldset', { class: 'nodes scroll' }, h('legend', {}, 'Current nodes: clear one to plan without it'), nodes.map((node) => {
        const slots = cluster.slots.filter((slot) => slot.node_id === node);
        const held = slots.filter((slot) => slot.job_id || slot.busy).length;
        return h('label', { class: 'check', 'data-key': node }, h('input', { type: 'checkbox', 'data-change': 'node', value: node, checked: !wanted.without.has(node), 'data-key': `in-${node}` }), ` ${node}`, h('span', { class: 'muted small' }, ` ${held} of ${slots.length} in use`));
      })));
  }

  function outcome() {
    if (got.error) return card('Outlook for 24 hours', null, h('p', { class: 'quiet-note' }, got.error.message, got.error.hint ? ` (${got.error.hint})` : ''));
    const { answer } = got;
    if (!answer) return card('Outlook for 24 hours', null, h('p', { class: 'quiet-note loading-part', role: 'status' }, 'Asking the scheduler…'));
    const keyOf = (item) => item.job_id ?? `${item.task}@${item.due_at}`;
    const before = new Map(answer.before.items.map((item) => [keyOf(item), item]));
    const after = new Map(answer.after.items.map((item) => [keyOf(item), item]));
    const refused = new Map(answer.verdicts.filter((one) => one.verdict.decision === 'rejected').map((one) => [one.job_id, one.verdict]));
    const keys = [...new Set([...after.keys(), ...before.keys(), ...[...refused.keys()].filter(find)])];
    const rows = keys.map((key) => ({ key, was: before.get(key), is: after.get(key), refused: refused.get(key) })).sort((a, b) => Number(differs(b)) - Number(differs(a)) || (itemOf(a).deadline_at ?? Infinity) - (itemOf(b).deadline_at ?? Infinity));
    const count = rows.filter(differs).length;
    const told = refused.size ? `${f.plural(refused.size, 'change')} would be refused, and nothing would come of ${refused.size > 1 ? 'them' : 'it'}` : null;
    const text = changed() ? (told ?? (count ? `${f.plural(count, 'task')} would be affected` : 'Nothing would change')) : 'As things are';
    const failing = (row) => itemOf(row).outcome !== 'kept';
    const sorted = [...rows].sort((a, b) => Number(failing(b)) - Number(failing(a)));
    const shownRows = changed() ? rows.filter(differs) : sorted.filter((row, at) => failing(row) || at < MANY);
    const rest = changed() ? rows.filter((row) => !differs(row)) : sorted.filter((row) => !shownRows.includes(row));
    const moved = (was, is) => (is && was && Math.abs(is - was) > 60 ? h('span', {}, h('s', { class: 'muted' }, f.moment(was)), ' ', time(is)) : time(is ?? was ?? null));
    const outlookTable = (some, name) => table(name, [['Task', ''], ['Starts', 'nowrap'], ['As things are', ''], ['Then', ''], ['Finish', 'nowrap'], ['Deadline', 'nowrap'], ['Why', 'wide']], some.map(({ key, was, is, refused: no }) => {
      const shown = itemOf({ key, was, is });
      return { key, attributes: differs({ was, is, refused: no }) ? { class: 'changed' } : {}, cells: [
        h('span', { 'data-tip': shown.task.length > 44 ? shown.task : null }, f.middle(shown.task, 44)),
        shown.kind === 'expected' ? time(shown.due_at) : 'live', was ? outcomeChip(was) : '–', no ? chip('Refused', 'bad', '✕') : is ? outcomeChip(is) : '–',
        moved(was?.projected_at, is?.projected_at ?? shown.projected_at),
        no ? h('span', {}, time(shown.deadline_at), h('span', { class: 'muted' }, ` (${f.moment(wanted.deadlines.get(key) ?? null)} refused)`)) : moved(was?.deadline_at, is?.deadline_at ?? shown.deadline_at), f.whole(no?.reason ?? shown.reason)] };
    }), { kind: 'outlook' });
    return card('Outlook for 24 hours', h('span', { 'aria-busy': String(got.asking) }, `${text}. ${f.whole(answer.after.summary)}`),
      h('div', { class: got.asking ? 'stale' : '', 'data-key': 'outcome' },
        shownRows.length ? outlookTable(shownRows, 'Outlook') : rows.length ? null : h('p', { class: 'quiet-note' }, 'Nothing with a deadline is due in the next 24 hours.'),
        rest.length ? fold('unchanged', changed() ? `${f.plural(rest.length, 'task')} unchanged` : `${f.plural(rest.length, 'more task')} on track`, outlookTable(rest, 'Unchanged')) : null));
  }

  const apart = (one, other) => (one ?? null) !== (other ?? null) && Math.abs((one ?? 0) - (other ?? 0)) > 60;
  const differs = ({ was, is, refused }) => Boolean(refused) || (was?.outcome ?? null) !== (is?.outcome ?? null) || apart(was?.projected_at, is?.projected_at) || apart(was?.deadline_at, is?.deadline_at);
  /** What a row is about; a change of what is due later is not among what the scheduler tells of. */
  const itemOf = ({ key, was, is }) => is ?? was ?? liveItem(find(key));
  const liveItem = (job) => ({ task: `${job.identity.dag_id}.${job.identity.task_id}`, kind: 'live', deadline_at: job.deadline_at, projected_at: job.projected_finish_at, reason: '' });
  const find = (id) => got.cluster.jobs.find((job) => job.job_id === id);

  async function apply(job) {
    const at = wanted.deadlines.get(job.job_id);
    const text = at === null ? `${jobName(job.identity)} gives its deadline up.` : `${jobName(job.identity)}: deadline ${f.moment(at)} instead of ${f.moment(job.deadline_at)}.`;
    if (!(await confirmed('Apply this change?', text, 'Apply', 'primary'))) return null;
    const answer = await api.amend(job.identity.dag_id, job.job_id, { claim: job.claim, ...(at === null ? { best_effort: true } : { deadline_at: at }) });
    if (!answer.accepted) throw new Error(f.sentence(answer.reason));
    wanted.deadlines.delete(job.job_id);
    return 'The deadline was changed.';
  }

  async function doing(work) {
    const done = await noted(work);
    if (done === null) return;
    got.note = done;
    refresh();
    askSoon();
  }

  const view = {
    title: 'What if',
    everyMs: 5000,
    hasShown: false,
    look,
    close: () => {
      clearTimeout(timer);
      aborter?.abort();
    },
    act(action, target) {
      const id = target.dataset.job;
      const put = (at) => {
        if (at !== null && find(id)?.deadline_at !== null && Math.abs(at - find(id).deadline_at) < 60) wanted.deadlines.delete(id);
        else wanted.deadlines.set(id, at);
      };
      if (action === 'shift') put(shifted(find(id), Number(target.value)));
      else if (action === 'drag') put(Number(target.value));
      else if (action === 'extra') wanted.extra = Number(target.value);
      else if (action === 'deadline') put(f.fromInput(target.value));
      else if (action === 'earliest') put(Number(target.value) + 60);
      else if (action === 'undo') wanted.deadlines.delete(id);
      else if (action === 'filter') {
        got.filter = target.value.toLowerCase().trim();
        render();
        return;
      } else if (action === 'more') wanted.extra += 1;
      else if (action === 'fewer') wanted.extra = Math.max(0, wanted.extra - 1);
      else if (action === 'node') wanted.without[target.checked ? 'delete' : 'add'](target.value);
      else if (action === 'reset') {
        wanted.deadlines.clear();
        wanted.extra = 0;
        wanted.without.clear();
        got.note = null;
      } else if (action === 'apply') {
        doing(apply(find(id)));
        return;
      } else return;
      askSoon();
    },
  };
  return view;
}
