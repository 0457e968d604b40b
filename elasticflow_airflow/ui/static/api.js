// Talks to our own routes in Airflow, and to Airflow's own, by addresses relative to the page: any base URL works.

export class Refused extends Error {
  constructor(status, body) {
    super(body.message ?? (typeof body.detail === 'string' ? body.detail : `the answer was ${status}`));
    this.status = status;
    this.code = body.error ?? '';
    this.hint = body.hint ?? '';
  }
}

async function ask(method, path, { params, body, signal, root = 'api' } = {}) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(params ?? {})) {
    if (value !== null && value !== undefined && value !== '') query.set(name, value);
  }
  const address = query.size ? `${root}/${path}?${query}` : `${root}/${path}`;
  let answer;
  try {
    answer = await fetch(address, {
      method,
      signal,
      headers: body === undefined ? {} : { 'Content-Type': 'application/json' },
      body: body === undefined ? undefined : JSON.stringify(body),
    });
  } catch (error) {
    if (error.name === 'AbortError') throw error;
    throw new Refused(0, { error: 'airflow_away', message: 'Airflow does not answer', hint: 'it is asked again by itself' });
  }
  const text = await answer.text();
  let told = {};
  try {
    told = text ? JSON.parse(text) : {};
  } catch {
    told = { message: text.slice(0, 200) };
  }
  if (!answer.ok) throw new Refused(answer.status, told);
  return told;
}

const of = (dag, job) => `dags/${encodeURIComponent(dag)}/jobs/${encodeURIComponent(job)}`;

export const me = () => ask('GET', 'me');
export const cluster = (signal) => ask('GET', 'cluster', { signal });
export const history = (from, until, parts, signal) =>
  ask('GET', 'history', { params: { from_at: from, until_at: until, parts }, signal });
export const forecast = (hours, signal) => ask('GET', 'forecast', { params: { hours }, signal });
export const attention = (signal) => ask('GET', 'attention', { signal });
export const latest = (signal) => ask('GET', 'latest', { signal });
export const jobs = (params, signal) => ask('GET', 'jobs', { params, signal });
export const story = (dag, job, incarnation, signal) => ask('GET', `${of(dag, job)}/story`, { params: { incarnation }, signal });
export const events = (dag, job, after, signal) => ask('GET', `${of(dag, job)}/events`, { params: { after }, signal });
export const runs = (dag, job, limit, signal) => ask('GET', `${of(dag, job)}/runs`, { params: { limit }, signal });
export const log = (dag, job, name, offset, incarnation, signal) =>
  ask('GET', `${of(dag, job)}/logs/${encodeURIComponent(name)}`, { params: { offset, incarnation, limit: 262144 }, signal });
export const stacks = (dag, job) => ask('POST', `${of(dag, job)}/stacks`, { body: {} });
export const cancel = (dag, job, claim) => ask('POST', `${of(dag, job)}/cancel`, { body: { claim } });
export const amend = (dag, job, change) => ask('PATCH', of(dag, job), { body: change });
/** Has Airflow itself run a failed task again, with those after it; what it has cleared. */
export const clearTask = ({ dag_id: dag, run_id: run, task_id: task, map_index: index }) =>
  ask('POST', `dags/${encodeURIComponent(dag)}/clearTaskInstances`, {
    root: '../api/v2',
    body: { dry_run: false, only_failed: true, include_downstream: true, dag_run_id: run, task_ids: [index >= 0 ? [task, index] : task] },
  });
export const whatIf = (request, signal) => ask('POST', 'what-if', { body: request, signal });
export const traceAddress = (dag, job, incarnation) => `api/${of(dag, job)}/trace.json${incarnation ? `?incarnation=${incarnation}` : ''}`;
