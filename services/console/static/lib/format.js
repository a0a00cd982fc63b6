// Numbers, times and text of a model as a person reads them.

const MISSING = "–";

/** A number with at most `digits` significant ones; "–" if there is none. */
export function number(value, digits = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  if (typeof value !== "number") return String(value);
  if (Number.isInteger(value)) return integer(value);
  const size = Math.abs(value);
  if (size >= 1000) return integer(Math.round(value));
  if (size < 0.001) return minus(value.toExponential(1));
  return minus(String(Number(value.toPrecision(digits))));
}

/** An integer with thin spaces between thousands. */
export function integer(value) {
  if (value === null || value === undefined) return MISSING;
  return minus(String(Math.round(value)).replace(/\B(?=(\d{3})+$)/g, "\u202f"));
}

/** Always as many decimals, for columns of numbers. */
export function fixed(value, decimals = 2) {
  if (value === null || value === undefined || Number.isNaN(value)) return MISSING;
  return minus(value.toFixed(decimals));
}

/** A share as a percentage. */
export function percent(value) {
  if (value === null || value === undefined) return MISSING;
  const share = 100 * value;
  return `${Number(share.toFixed(share !== 0 && Math.abs(share) < 10 ? 1 : 0))}\u202f%`;
}

function minus(text) {
  return text.replace(/^-/, "\u2212");
}

/** Seconds as "840 ms", "12 s", "3 min 20 s", "2 h 05 min" or "4 d 3 h". */
export function duration(seconds) {
  if (seconds === null || seconds === undefined || Number.isNaN(seconds)) return MISSING;
  if (seconds < 0) return "0 s";
  if (seconds < 1) return `${Math.round(seconds * 1000)} ms`;
  if (seconds < 10) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const whole = Math.round(seconds);
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h ${two(minutes % 60)} min`;
  return `${Math.floor(minutes / 1440)} d ${Math.floor(minutes / 60) % 24} h`;
}

/** A Unix time in seconds as a local time; with the day unless it is today. */
export function clock(seconds) {
  if (!seconds) return MISSING;
  const then = new Date(seconds * 1000);
  const time = `${two(then.getHours())}:${two(then.getMinutes())}:${two(then.getSeconds())}`;
  return then.toDateString() === new Date().toDateString() ? time : `${day(then)} ${time}`;
}

function day(then) {
  return `${then.getFullYear()}-${two(then.getMonth() + 1)}-${two(then.getDate())}`;
}

function two(value) {
  return String(value).padStart(2, "0");
}

/** "v3", or "v3–v5" when the versions differ. */
export function versions(from, to) {
  if (from === null || from === undefined) return MISSING;
  return to === null || to === undefined || to === from ? `v${from}` : `v${from}–v${to}`;
}

/** A long id without its middle: rollouts of a group differ at the end. */
export function shortId(id) {
  return id && id.length > 20 ? `${id.slice(0, 9)}…${id.slice(-9)}` : String(id ?? "");
}

/** Text in which control and direction characters are seen instead of obeyed. */
export function visible(text) {
  return text.replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (character) => {
      const code = character.charCodeAt(0);
      if (code === 13) return "";
      return `\u27e8U+${code.toString(16).toUpperCase().padStart(4, "0")}\u27e9`;
    },
  );
}

/** The first line of a text, at most so long. */
export function firstLine(text, length = 100) {
  const line = visible(text.slice(0, 4 * length)).trim().split("\n", 1)[0];
  return line.length > length ? `${line.slice(0, length - 1)}…` : line;
}
