// Hears that something has happened, by server-sent events; where there are none, the page asks every few seconds.

const AGAIN_MS = 60000;

export class Changes {
  /** `heard()` is called whenever there may be something new. Only a page that somebody looks at listens. */
  constructor(heard) {
    this.heard = heard;
    this.stream = null;
    this.open = false;
    document.addEventListener('visibilitychange', () => (document.hidden ? this.stop() : this.listen()));
    this.listen();
  }

  listen() {
    clearTimeout(this.timer);
    if (this.stream || document.hidden) return;
    const stream = new EventSource('api/changes');
    this.stream = stream;
    stream.addEventListener('open', () => {
      this.open = true;
      this.heard();
    });
    stream.addEventListener('changed', () => this.heard());
    stream.addEventListener('error', () => {
      this.open = false; // The browser connects again by itself, unless it was refused.
      if (stream.readyState !== EventSource.CLOSED || stream !== this.stream) return;
      this.stop();
      this.timer = setTimeout(() => this.listen(), AGAIN_MS);
    });
  }

  stop() {
    clearTimeout(this.timer);
    this.stream?.close();
    this.stream = null;
    this.open = false;
  }
}
