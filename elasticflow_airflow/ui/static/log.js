// The end of a worker's log, read on from where it was.

import * as api from './api.js';

const KEPT = 200000;
const BEHIND_ANY = Number.MAX_SAFE_INTEGER;
// eslint-disable-next-line no-control-regex -- terminals' colours
const CODES = /\u001b\[[0-9;?]*[A-Za-z]/g;

/** The log of the rank 0 that was started last. Names are like g000002-r000; a worker that stays keeps its log. */
const newestMain = (names) => names.filter((name) => name.endsWith('-r000')).sort().at(-1) ?? names[0];

export class LogTail {
  constructor(dag, job) {
    this.dag = dag;
    this.job = job;
    this.follow = true;
    this.reset(null);
  }

  reset(incarnation) {
    this.incarnation = incarnation;
    this.name = null;
    this.chosen = false;
    this.restart();
  }

  /** Somebody wants this one, and no other when a newer one begins. */
  choose(name) {
    this.chosen = true;
    this.name = name;
    this.restart();
  }

  restart() {
    this.offset = null;
    this.text = '';
  }

  /** Where to begin: a log may be huge, and its end is what is wanted. Behind the end, the service says where that is. */
  async begin(signal) {
    const end = await api.log(this.dag, this.job, this.name, BEHIND_ANY, this.incarnation, signal);
    this.offset = end.start_offset < BEHIND_ANY ? Math.max(0, end.start_offset - KEPT) : 0;
  }

  /** Read what is new; a log that cannot be read is no reason to show nothing else. */
  async read(status, signal) {
    if (!status.log_names.length) return;
    const wanted = this.chosen && status.log_names.includes(this.name) ? this.name : newestMain(status.log_names);
    if (wanted !== this.name) {
      this.name = wanted;
      this.restart();
    }
    for (let pieces = 0; pieces < 8; pieces += 1) {
      let piece;
      try {
        if (this.offset === null) await this.begin(signal);
        piece = await api.log(this.dag, this.job, this.name, this.offset, this.incarnation, signal);
      } catch (error) {
        if (error.name === 'AbortError') throw error;
        this.text ||= `(${error.status === 403 ? 'Airflow does not let you read this DAG’s logs' : error.message})`;
        return;
      }
      this.text = (this.text + piece.text).slice(-KEPT);
      const stuck = piece.next_offset <= this.offset;
      this.offset = piece.next_offset;
      if (piece.end_of_file || stuck) return;
    }
  }

  draw() {
    const into = document.getElementById('log');
    const text = this.text.replace(CODES, '') || (this.offset === null ? 'Loading…' : '(nothing written)');
    if (!into || into.textContent === text) return;
    const atEnd = into.scrollHeight - into.scrollTop - into.clientHeight < 40 || !into.textContent;
    into.textContent = text;
    if (this.follow && atEnd) into.scrollTop = into.scrollHeight;
  }
}
