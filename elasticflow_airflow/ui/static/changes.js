// Hears that something has happened, by server-sent events; where there are none, the page asks every few seconds.

const AGAIN_MS = 60000;
const TRIES = 3;

export class Changes {
  /** `heard()` is called whenever there may be something new. Only a page that somebody looks at listens. */
  constructor(heard) {
    this.heard = heard;
    this.stream = null;
    this.follows = false;
    document.addEventListener('visibilitychange', () => (document.hidden ? this.stop() : this.listen()));
    this.listen();
  }

  listen() {
    clearTimeout(this.timer);
    if (this.stream || document.hidden) return;
    const stream = new EventSource('api/changes');
    this.stream = stream;
    let failures = 0;
    stream.addEventListener('open', () => { failures = 0; });
    stream.addEventListener('following', () => { this.follows = true; });
    stream.addEventListener('away', () => { this.follows = false; });
    stream.addEventListener('changed', () => this.heard());
    stream.addEventListener('error', () => {
      // A stream ends every few seconds, and the browser opens the next one: unless it was refused, or nobody answers.
      failures += 1;
      if (stream !== this.stream || (stream.readyState !== EventSource.CLOSED && failures < TRIES)) return;
      this.stop();
      this.timer = setTimeout(() => this.listen(), AGAIN_MS);
    });
  }

  stop() {
    clearTimeout(this.timer);
    this.stream?.close();
    this.stream = null;
    this.follows = false;
  }
}
