// What a job was submitted with: in words and local times; the submission as it was sent is behind a fold.

import { h } from '../dom.js';
import * as f from '../format.js';
import { card, fold, time } from '../parts.js';

const ON_REJECT = {
  fail: 'its task fails',
  best_effort: 'it trains as best effort',
  wait: 'it waits for capacity',
  renegotiate: 'a later deadline is accepted',
  late: 'a later deadline is accepted, and worth less',
};
const ON_MISS = { finish: 'it trains to its end', fail: 'its task fails', use_last_checkpoint: 'its last checkpoint is used' };

function lengthOf({ length, target_loss: target }) {
  const { steps, epochs, samples } = length;
  const ofEach = samples ? ` of ${f.plural(samples, 'sample')}` : '';
  const whole = steps ? f.plural(steps, 'step') : epochs ? `${f.plural(epochs, 'epoch')}${ofEach}` : 'as long as its script says';
  return target === null || target === undefined ? whole : `until the loss is ${f.number(target)}, ${whole} at most`;
}

function workersOf({ min_workers: least, max_workers: most }) {
  if (!most) return `${f.number(least)} or more`;
  return least === most ? f.number(most) : `${f.number(least)} to ${f.number(most)}`;
}

function speeds(curve) {
  const points = Object.entries(curve ?? {});
  return points.length ? points.map(([workers, speed]) => `${f.number(speed)} steps/s with ${f.plural(Number(workers), 'worker')}`).join(', ') : null;
}

function rows(submission) {
  const { command, best_effort: bestEffort } = submission;
  if (!command) return []; // What is stored of it cannot be read.
  const latest = submission.latest_deadline_at;
  return [
    ['Trains', h('code', {}, [command.script ?? command.module, ...(command.args_shown ?? command.args ?? [])].join(' '))],
    ['Length', lengthOf({ length: {}, ...submission })],
    ['Deadline', bestEffort ? 'none: best effort' : [time(submission.deadline_at), latest ? [', at the latest ', time(latest)] : null]],
    ['If it cannot be promised', bestEffort ? null : ON_REJECT[submission.on_reject]],
    ['If it is missed', bestEffort ? null : ON_MISS[submission.on_miss]],
    ['Workers', workersOf(submission)],
    ['Global batch', f.plural(submission.global_batch_size, 'sample')],
    ['Weights', submission.consistency === 'fast' ? 'depend on the number of workers (fast)' : 'the same with any number of workers'],
    ['Seed', submission.seed ?? null],
    ['Starts from', submission.init_from ?? null],
    ['Environment', [command.python, ...(command.requirements ?? [])].filter(Boolean).join(', ') || null],
    ['Speeds it was given', speeds(submission.scaling_curve)],
    ['Worth', submission.value === 1 ? null : f.number(submission.value)],
    ['Next run due', submission.next_run_at ? time(submission.next_run_at) : null],
  ].filter(([, value]) => value !== null && value !== undefined && value !== '');
}

const flat = (value) => (value !== null && typeof value === 'object' ? (Array.isArray(value) ? value.map(flat).join(' ') : JSON.stringify(value)) : String(value));

export function asked({ submission }) {
  const { identity: _, command = {}, length = {}, labels: told = {}, ...others } = submission; // The title says the identity.
  const { deadline_arithmetic: arithmetic, ...labels } = told;
  const raw = Object.entries({ ...command, ...length, ...others, labels }).filter(([, value]) => value !== null && value !== '' && !(typeof value === 'object' && !Object.keys(value).length));
  const said = rows(submission);
  return card('What was asked for', null,
    said.length ? h('dl', { class: 'asked' }, said.map(([name, value]) => [h('dt', {}, name), h('dd', {}, value)])) : null,
    arithmetic ? h('pre', { class: 'code wrapped', tabindex: 0, 'data-key': 'arithmetic', 'aria-label': 'How the deadline came about' }, arithmetic) : null,
    fold('raw', 'As it was submitted', h('dl', { class: 'asked raw' }, raw.map(([name, value]) => [h('dt', {}, name), h('dd', {}, h('code', {}, /_at$/.test(name) && typeof value === 'number' ? f.precise(value) : flat(value)))]))));
}
