// Keeps a view up to date: asks every few seconds while somebody looks, and goes on when the service was away.

const LONGEST_MS = 30000;

export class Live {
  /** `look(signal)` fetches and draws, every `everyMs()`; `failed(error)` shows what went wrong. */
  constructor(look, everyMs, failed) {
    this.look = look;
    this.everyMs = everyMs;
    this.failed = failed;
    this.failures = 0;
    this.aborter = new AbortController();
    this.timer = null;
    this.busy = false;
    this.visible = () => {
      if (!document.hidden) this.soon();
    };
    document.addEventListener('visibilitychange', this.visible);
    this.tick();
  }

  stop() {
    this.aborter.abort();
    clearTimeout(this.timer);
    document.removeEventListener('visibilitychange', this.visible);
  }

  /** Look now, rather than when it is time. */
  soon() {
    clearTimeout(this.timer);
    if (!this.busy) this.tick();
    else this.again = true;
  }

  async tick() {
    if (this.aborter.signal.aborted) return;
    this.busy = true;
    this.again = false;
    try {
      await this.look(this.aborter.signal);
      this.failures = 0;
    } catch (error) {
      if (this.aborter.signal.aborted) return;
      this.failures += 1;
      this.failed(error);
    }
    this.busy = false;
    if (this.aborter.signal.aborted) return;
    const pause = this.again ? 0 : Math.min(LONGEST_MS, this.everyMs() * 2 ** Math.min(this.failures, 4));
    if (!document.hidden) this.timer = setTimeout(() => this.tick(), pause);
  }
}
