// Times, durations and numbers as people read them. Times come as UTC seconds and are shown in the browser's zone.

const DAY_S = 86400;
const clock = new Intl.DateTimeFormat([], { hour: '2-digit', minute: '2-digit', hourCycle: 'h23' });
const clockFine = new Intl.DateTimeFormat([], { hour: '2-digit', minute: '2-digit', second: '2-digit', hourCycle: 'h23' });
const day = new Intl.DateTimeFormat([], { weekday: 'short', day: 'numeric', month: 'short' });
const full = new Intl.DateTimeFormat([], { dateStyle: 'medium', timeStyle: 'long', hourCycle: 'h23' });

export const nowS = () => Date.now() / 1000;
const dayOf = (at) => new Date(at * 1000).toDateString();

const weekday = new Intl.DateTimeFormat([], { weekday: 'short' });

/** 14:05 today, "Tue 14:05" within the next days, "Tue, 3 Nov 14:05" on all others. */
export function moment(at, reference = nowS()) {
  if (at === null || at === undefined) return '–';
  const date = new Date(at * 1000);
  if (dayOf(at) === dayOf(reference)) return clock.format(date);
  const soon = at > reference && at - reference < 6 * DAY_S;
  return `${(soon ? weekday : day).format(date)} ${clock.format(date)}`;
}

export const momentFine = (at) =>
  dayOf(at) === dayOf(nowS())
    ? clockFine.format(new Date(at * 1000))
    : `${day.format(new Date(at * 1000))} ${clockFine.format(new Date(at * 1000))}`;

export const hour = (at) => clock.format(new Date(at * 1000));
export const onDay = (at) => `${weekday.format(new Date(at * 1000))} ${new Date(at * 1000).getDate()}`;
export const precise = (at) => (at === null || at === undefined ? '' : full.format(new Date(at * 1000)));
export const iso = (at) => new Date(at * 1000).toISOString();

/** For the charts, which know no zones: local wall-clock time. */
export function wall(at) {
  const shifted = new Date(at * 1000);
  shifted.setMinutes(shifted.getMinutes() - shifted.getTimezoneOffset());
  return shifted.toISOString().slice(0, -1);
}

// Each with its seconds, the unit below and its seconds, and by how much less is rounded up to it.
const UNITS = [['d', DAY_S, 'h', 3600, 30], ['h', 3600, 'min', 60, 0.5], ['min', 60, 's', 1, 0.5]];

/** A duration as the service writes it (times.py): its two largest units; tenths of a second below ten. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return '–';
  const sign = seconds < 0 ? '−' : '';
  const length = Math.abs(seconds);
  if (length < 9.95) {
    const tenths = length.toFixed(1).replace(/\.0$/, '');
    return tenths === '0' ? '0 s' : `${sign}${tenths} s`;
  }
  for (const [unit, size, smaller, step, slack] of UNITS) {
    if (length < size - slack) continue;
    const rounded = Math.round(length / step) * step;
    const count = Math.floor(rounded / size);
    const left = Math.floor((rounded - count * size) / step);
    return `${sign}${count} ${unit}${left ? ` ${left} ${smaller}` : ''}`;
  }
  return `${sign}${Math.round(length)} s`;
}

/** Three significant digits, large numbers grouped. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (Number.isInteger(value)) return value.toLocaleString();
  if (Math.abs(value) >= 10 ** digits) return Math.round(value).toLocaleString();
  return String(Number(value.toPrecision(digits)));
}

/** A long name without its middle: the beginning says whose it is, the end which one. */
export function middle(text, most) {
  if (text.length <= most) return text;
  const end = Math.floor((most - 1) / 2);
  return `${text.slice(0, most - 1 - end)}…${text.slice(text.length - end)}`;
}

export const percent = (part) => (Number.isFinite(part) ? `${Math.round(part * 100)} %` : '–');
export const plural = (count, one, many = `${one}s`) => `${number(count)} ${count === 1 ? one : many}`;

export function bytes(count) {
  if (count === null || count === undefined) return '–';
  const units = ['B', 'KiB', 'MiB', 'GiB', 'TiB'];
  let unit = 0;
  let left = count;
  while (left >= 1024 && unit < units.length - 1) {
    left /= 1024;
    unit += 1;
  }
  return `${number(left)} ${units[unit]}`;
}

/** "03:10 UTC" and "2026-11-22 03:10 UTC": without a date, the next time of day, or one of the last hours. */
function timesOfDay(text) {
  return text.replace(/(?:(\d{4}-\d\d-\d\d) )?(\d\d:\d\d(?::\d\d)?) UTC/g, (_, date, time) => {
    const day = date ?? new Date().toISOString().slice(0, 10);
    let at = Date.parse(`${day}T${time.length === 5 ? `${time}:00` : time}Z`) / 1000;
    if (!date && at < nowS() - 4 * 3600) at += DAY_S;
    if (!date && at > nowS() + 20 * 3600) at -= DAY_S;
    return time.length === 8 ? momentFine(at) : moment(at);
  });
}

/** Times inside the service's sentences are ISO in UTC: show them as the rest of the page shows times. */
export const sentence = (text) =>
  timesOfDay(text ?? '').replace(/\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00)/g, (found) => moment(Date.parse(found) / 1000));

/** The same as a sentence of its own. */
export function whole(text) {
  const told = sentence(text).trim();
  if (!told) return '';
  const name = /^[^\s]*[._]/.test(told); // A task's or an argument's name stays as it is written.
  return `${name ? told[0] : told[0].toUpperCase()}${told.slice(1)}${/[.!?]$/.test(told) ? '' : '.'}`;
}

/** A value for <input type="datetime-local">, and back. */
export const toInput = (at) => wall(Math.floor(at / 60) * 60).slice(0, 16); // The minute that `moment` shows.
export const fromInput = (text) => (text ? new Date(text).getTime() / 1000 : null);
