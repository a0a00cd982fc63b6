// Small parts that several screens show: states, badges, facts, tables, errors and progress.

import { h, fill, announce } from "./dom.js";
import { fixed, integer, number, versions, shortId, duration } from "./format.js";
import { link } from "./route.js";

const GOOD = new Set(["finished", "trained", "committed", "running", "ready"]);
const BAD = new Set(["failed", "discarded", "rejected", "dead_letter"]);

/** A state in its colour; the word itself is always there. */
export function badge(state) {
  const word = String(state ?? "unknown");
  const tone = GOOD.has(word) ? "good" : BAD.has(word) ? "bad" : word === "waiting" ? "warn" : "calm";
  return h("span", { class: `badge badge-${tone}` }, word.replaceAll("_", " "));
}

/** Text in which what stands between backticks is code. */
export function withCode(text) {
  return String(text ?? "").split("`").map((part, index) => (index % 2 ? h("code", {}, part) : part));
}

/** Names and values side by side; those without a value are left out. */
export function facts(pairs) {
  const given = pairs.filter(([, value]) => value !== null && value !== undefined && value !== "–" && value !== "");
  return h("dl", { class: "facts" }, given.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
}

/** A titled part of a screen. */
export function panel(title, ...children) {
  return h("section", { class: "panel", "aria-label": title }, h("h2", {}, title), children);
}

/** What stands where nothing is. */
export function empty(text) {
  return h("p", { class: "empty" }, text);
}

/** A failed request, with its cure. */
export function failure(error) {
  announce(error.message);
  return h("div", { class: "failure", role: "alert" }, h("strong", {}, error.message), error.cure ? h("p", {}, error.cure) : null);
}

/** A progress bar; without a total it only moves. */
export function progress(text, done = null, total = null) {
  const known = total ? { value: done, max: total } : {};
  const bar = h("progress", { "aria-label": text });
  Object.assign(bar, known);
  return h("p", { class: "progress" }, bar, h("span", {}, text));
}

/** A table: columns `{ name, title, numeric, cell(row), sort }`; `sorted` is `{ name, down }`. */
export function table(label, columns, rows, { sorted = null, onSort = null } = {}) {
  const head = columns.map((column) => heading(column, sorted, onSort));
  const body = rows.map((row) => h("tr", {}, columns.map((column) => cell(column, row))));
  const inner = h("table", {}, h("caption", { class: "unseen" }, label), h("thead", {}, h("tr", {}, head)), h("tbody", {}, body));
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, inner);
}

function cell(column, row) {
  const shown = column.cell(row);
  const classes = [column.numeric && "num", column.wide && "wide", column.style, shown === "–" && "missing"].filter(Boolean).join(" ");
  return h("td", { class: classes || null, "data-title": column.title }, shown);
}

function heading(column, sorted, onSort) {
  const style = column.numeric ? "num" : null;
  const title = column.about ? { title: column.about } : {};
  if (!onSort || !column.value) return h("th", { scope: "col", class: style, ...title }, column.title);
  const here = sorted?.name === column.name;
  const order = here ? (sorted.down ? "descending" : "ascending") : "none";
  const mark = here ? (sorted.down ? " ↓" : " ↑") : "";
  const button = h("button", { class: "sort", onclick: () => onSort(column.name), ...title }, column.title, h("span", { "aria-hidden": "true" }, mark));
  return h("th", { scope: "col", class: style, "aria-sort": order }, button);
}

/** Rows in the order of a column; those without a value come last. */
export function sortRows(rows, columns, sorted) {
  const column = columns.find((one) => one.name === sorted?.name);
  if (!column) return rows;
  const sign = sorted.down ? -1 : 1;
  return [...rows].sort((one, other) => sign * compare(column.value(one), column.value(other), sign));
}

function compare(one, other, sign) {
  const [no, none] = [one === null || one === undefined, other === null || other === undefined];
  if (no || none) return sign * (Number(no) - Number(none));
  return one < other ? -1 : one > other ? 1 : 0;
}

/** Columns of a rollout's row, as in lists and in groups. */
export function rolloutColumns(run, linkQuery = {}) {
  const text = (name, title, about) => ({ name, title, about, style: "excerpt", value: (row) => row[name], cell: (row) => (row[name] ? h("span", { title: row[name], dir: "auto" }, row[name]) : row[name] === "" ? h("span", { class: "quiet" }, "empty") : "–") });
  const numeric = (name, title, show, about) => ({ name, title, about, numeric: true, value: (row) => row[name], cell: (row) => show(row[name]) });
  return [
    { name: "rollout_id", title: "Rollout", value: (row) => row.rollout_id, cell: (row) => rolloutLink(run, row, linkQuery) },
    text("prompt", "Prompt", "The user's first message; the task, while nothing is recorded"),
    text("answer", "Answer", "The end of the last answer"),
    numeric("reward", "Reward", (value) => fixed(value)),
    { name: "outcome", title: "Ended", value: (row) => row.failure ?? row.finish, cell: (row) => outcome(row) },
    numeric("tokens", "Tokens", integer),
    numeric("turns", "Turns", integer),
    numeric("tool_calls", "Tools", integer, "Tool calls"),
    { name: "version_from", title: "Versions", numeric: true, value: (row) => row.version_from, cell: (row) => versions(row.version_from, row.version_to) },
    numeric("staleness", "Stale", integer, "Staleness: versions between sampling and training"),
    numeric("advantage", "Advantage", (value) => fixed(value), "Mean over the trained tokens"),
    numeric("ratio", "Ratio", (value) => fixed(value, 3), "Mean importance ratio"),
    numeric("logprob_diff", "Log-prob gap", (value) => fixed(value, 4), "Mean |trainer − engine| log-prob of trained tokens"),
    numeric("seconds", "Took", duration, "From its start to its end"),
  ];
}

/** Only the columns for which some row has a value; the first always. */
export function usedColumns(columns, rows) {
  return columns.filter((column, index) => index === 0 || !column.value || rows.some((row) => known(column.value(row))));
}

function known(value) {
  return value !== null && value !== undefined && value !== "";
}

function rolloutLink(run, row, query) {
  return h("a", { href: link(run, "rollouts", row.rollout_id, query), "data-row": true, class: "mono", title: row.rollout_id }, shortId(row.rollout_id));
}

function outcome(row) {
  if (row.failure) return h("span", { class: "tone-bad" }, row.failure);
  return row.finish ?? "–";
}

/** A number with its name, for the signals of a run. */
export function tile(name, value, note = null) {
  return h("div", { class: "tile" }, h("dt", {}, name), h("dd", {}, typeof value === "number" ? number(value) : value), note ? h("dd", { class: "note" }, note) : null);
}

/** A labelled input, select or range. */
export function field(label, control) {
  return h("label", { class: "field" }, h("span", {}, label), control);
}

/** A select of `[value, text]` choices. */
export function select(choices, value, onChange, attributes = {}) {
  const options = choices.map(([one, text]) => h("option", { value: one }, text));
  const element = h("select", { ...attributes, onchange: (event) => onChange(event.target.value) }, options);
  element.value = value;
  return element;
}

/** Buttons of which one is chosen. */
export function choice(label, choices, chosen, onChoose) {
  const buttons = choices.map(([value, text, about]) =>
    h("button", { class: "segment", title: about, "aria-pressed": String(value === chosen), onclick: (event) => {
      for (const other of event.currentTarget.parentNode.children) other.setAttribute("aria-pressed", "false");
      event.currentTarget.setAttribute("aria-pressed", "true");
      onChoose(value);
    } }, text));
  return h("div", { class: "segments", role: "group", "aria-label": label }, buttons);
}

/** Show `element` while `work` runs; then what it gives, or its failure. */
export async function loading(place, text, work) {
  const timer = setTimeout(() => fill(place, progress(text)), 150);
  try {
    return await work();
  } catch (error) {
    clearTimeout(timer);
    if (error.name !== "AbortError" && error.status !== 401) fill(place, failure(error));
    throw error;
  } finally {
    clearTimeout(timer);
  }
}
