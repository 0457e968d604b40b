// Another attempt of a job that was rejected: what it asks for is set first, then its task is cleared in Airflow.

import * as api from './api.js';
import { h } from './dom.js';
import * as f from './format.js';
import { confirmed, jobName } from './parts.js';

/** The deadline to offer: as long from now as the earliest feasible one was from the submission; null: none is known. */
function offered(job) {
  const earliest = job.verdict.earliest_deadline_at;
  if (earliest === null || earliest === undefined) return null;
  return Math.ceil((earliest + Math.max(0, f.nowS() - job.submitted_at) + 60) / 60) * 60; // a minute for Airflow to start it
}

/** The buttons that submit a rejected job again; `act('resubmit', button)` is called with the choice. */
export function choices(job) {
  const at = offered(job);
  const button = (text, change) => h('button', { type: 'button', class: 'button small-button', 'data-action': 'resubmit', 'data-job': job.job_id, value: JSON.stringify(change), 'aria-label': `${text}: ${jobName(job.identity)}` }, text);
  return [at === null ? null : button(`Submit for ${f.moment(at)}`, { deadline_at: at }), button('Submit as best effort', { best_effort: true })];
}

/** Asks, then submits again; what has been done, or null if nothing. */
export async function resubmit(job, change) {
  const { identity } = job;
  const asks = change.best_effort ? 'is best effort' : `asks for the deadline ${f.moment(change.deadline_at)}`;
  const text = `Airflow clears ${jobName(identity)} and the failed tasks after it. The new attempt ${asks}; attempts of other runs ask for what the DAG says.`;
  if (!(await confirmed('Submit this job again?', text, 'Submit', 'primary'))) return null;
  const answer = await api.amend(identity.dag_id, job.job_id, { claim: job.claim, next_attempt: true, ...change });
  if (!answer.accepted) throw new Error(f.sentence(answer.reason));
  let cleared;
  try {
    cleared = await api.clearTask(identity);
  } catch (error) {
    throw new Error(`Airflow did not clear the task (${error.message}). Clear it there: its next attempt ${asks}`);
  }
  return cleared.total_entries ? `The task was cleared: its new attempt ${asks}.` : `Airflow has no failed task to clear. The next attempt ${asks}.`;
}
