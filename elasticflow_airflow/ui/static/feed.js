// One part of a view, fetched on its own: it keeps its last answer, and knows when it is slow, late or has failed.

const SLOW_MS = 2500;
const LIMIT_MS = 30000;
const LONGEST_MS = 60000;
const QUICK_MS = 10000;
let changedAt = 0;

/** Something has happened: what is asked for every few seconds is out of date. */
export function outdate() {
  changedAt = Date.now();
}

export class Feed {
  /** `ask(signal)` fetches it, every `everyMs`; `changed()` draws. What has not come after `limitMs` is given up. */
  constructor(ask, everyMs, changed, limitMs = LIMIT_MS) {
    Object.assign(this, { ask, everyMs, changed, limitMs });
    this.value = null;
    this.error = null;
    this.slow = false;
    this.failures = 0;
    this.askedAt = 0;
    this.dueAt = 0;
    this.aborter = null;
  }

  /** Ask now if it is time; never waits for the answer. */
  tick() {
    const outdated = this.everyMs <= QUICK_MS && this.askedAt < Math.min(changedAt, Date.now() - this.everyMs / 2) && !this.failures;
    if (this.aborter || (Date.now() < this.dueAt && !outdated)) return;
    this.fetch();
  }

  /** Ask at once, whatever has been asked before: the question has changed, or somebody wants to try again. */
  again() {
    this.stop();
    this.failures = 0;
    this.fetch();
  }

  stop() {
    this.aborter?.abort();
    this.aborter = null;
  }

  async fetch() {
    const aborter = new AbortController();
    this.aborter = aborter;
    this.askedAt = Date.now();
    const current = () => this.aborter === aborter;
    const slow = setTimeout(() => {
      if (!current() || this.value) return;
      this.slow = true;
      this.changed();
    }, SLOW_MS);
    let gaveUp = false;
    const limit = setTimeout(() => {
      gaveUp = true;
      aborter.abort();
    }, this.limitMs);
    try {
      const value = await this.ask(aborter.signal);
      if (!current()) return;
      this.value = value;
      this.error = null;
      this.failures = 0;
    } catch (error) {
      if (!current()) return;
      this.error = gaveUp ? new Error(`no answer within ${Math.round(this.limitMs / 1000)} s`) : error;
      this.failures += 1;
    } finally {
      clearTimeout(slow);
      clearTimeout(limit);
    }
    this.aborter = null;
    this.slow = false;
    this.dueAt = Date.now() + Math.min(LONGEST_MS, this.everyMs * 2 ** Math.min(this.failures, 3));
    this.changed();
  }
}
