// The end of a worker's log, read on from where it was.

import * as api from './api.js';

const KEPT = 200000;
// eslint-disable-next-line no-control-regex -- terminals' colours
const CODES = /\u001b\[[0-9;?]*[A-Za-z]/g;

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
    this.restart();
  }

  choose(name) {
    this.name = name;
    this.restart();
  }

  restart() {
    this.offset = 0;
    this.text = '';
  }

  /** Read what is new; a log that cannot be read is no reason to show nothing else. */
  async read(status, signal) {
    if (!status.log_names.length) return;
    if (!status.log_names.includes(this.name)) this.choose(status.log_names[0]);
    for (let pieces = 0; pieces < 8; pieces += 1) {
      let piece;
      try {
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
    const text = this.text.replace(CODES, '') || '(nothing written)';
    if (!into || into.textContent === text) return;
    const atEnd = into.scrollHeight - into.scrollTop - into.clientHeight < 40 || !into.textContent;
    into.textContent = text;
    if (this.follow && atEnd) into.scrollTop = into.scrollHeight;
  }
}
