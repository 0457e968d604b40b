// The part of time that the timeline shows: it follows the present until somebody zooms or moves it.

const LEAST_S = 300;
const MOST_S = 30 * 86400;
const AHEAD_AT_MOST_S = 13 * 86400;

export class TimeWindow {
  /** Seconds before and after now. */
  constructor(pastS, aheadS) {
    this.follow(pastS, aheadS);
  }

  follow(pastS, aheadS) {
    Object.assign(this, { pastS, aheadS, chosen: null });
  }

  get follows() {
    return this.chosen === null;
  }

  /** {from, until} in UTC seconds. */
  at(now) {
    return this.chosen ?? { from: now - this.pastS, until: now + this.aheadS };
  }

  /** Show `factor` times as much time; the moment `keep` stays where it is. */
  zoom(factor, now, keep = now) {
    const { from, until } = this.at(now);
    const span = Math.min(MOST_S, Math.max(LEAST_S, (until - from) * factor));
    const part = Math.min(1, Math.max(0, (keep - from) / (until - from)));
    this.put(keep - part * span, span, now);
  }

  /** Move by a part of what is shown: later if positive. */
  move(part, now) {
    const { from, until } = this.at(now);
    this.put(from + part * (until - from), until - from, now);
  }

  put(from, span, now) {
    const begin = Math.min(from, now + AHEAD_AT_MOST_S - span);
    this.chosen = { from: begin, until: begin + span };
  }
}

const KEYS = {
  '+': (time, now) => time.zoom(0.5, now),
  '=': (time, now) => time.zoom(0.5, now),
  '-': (time, now) => time.zoom(2, now),
  'shift+ArrowLeft': (time, now) => time.move(-0.25, now),
  'shift+ArrowRight': (time, now) => time.move(0.25, now),
};

/** Zoom by Ctrl and the wheel, move by dragging or a sideways wheel, both by keys, inside `.gantt`; until `stop()`. */
export function steer(main, time, now, changed) {
  const picture = (event) => event.target.closest?.('.gantt');
  const place = (svg) => ({ left: svg.getBoundingClientRect().left + Number(svg.dataset.left), inner: Number(svg.dataset.inner) });
  let drag = null;

  function wheel(event) {
    const svg = picture(event);
    if (!svg) return;
    const { left, inner } = place(svg);
    const { from, until } = time.at(now());
    if (event.ctrlKey || event.metaKey) time.zoom(1.0015 ** event.deltaY, now(), from + ((event.clientX - left) / inner) * (until - from));
    else if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) time.move((event.deltaX || event.deltaY) / inner, now());
    else return; // The page scrolls.
    event.preventDefault();
    changed();
  }

  function down(event) {
    const svg = picture(event);
    if (svg && event.button === 0 && !event.target.closest('[data-action]')) drag = { x: event.clientX, moved: false, inner: place(svg).inner };
  }

  function move(event) {
    if (!drag || (!drag.moved && Math.abs(event.clientX - drag.x) < 5)) return;
    drag.moved = true;
    time.move((drag.x - event.clientX) / drag.inner, now());
    drag.x = event.clientX;
    changed();
  }

  function up() {
    if (!drag) return;
    const stop = (event) => event.preventDefault();
    if (drag.moved) addEventListener('click', stop, { capture: true }); // The click that follows a drag opens no job.
    setTimeout(() => removeEventListener('click', stop, { capture: true }), 0);
    drag = null;
  }

  const keep = (event) => picture(event) && event.preventDefault(); // A bar is a link, which a browser would drag away.

  function key(event) {
    if (!picture(event) || event.ctrlKey || event.metaKey) return;
    const act = KEYS[event.shiftKey && event.key.startsWith('Arrow') ? `shift+${event.key}` : event.key];
    if (!act) return;
    event.preventDefault();
    act(time, now());
    changed();
  }

  const heard = [['wheel', wheel, { passive: false }], ['pointerdown', down], ['dragstart', keep], ['keydown', key]];
  for (const [kind, told, options] of heard) main.addEventListener(kind, told, options);
  addEventListener('pointermove', move);
  addEventListener('pointerup', up);
  return () => {
    for (const [kind, told] of heard) main.removeEventListener(kind, told);
    removeEventListener('pointermove', move);
    removeEventListener('pointerup', up);
  };
}
