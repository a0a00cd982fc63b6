// The list of rollouts, newest first: filters and search are in the link.

import { get } from "../lib/api.js";
import { announce, fill, h } from "../lib/dom.js";
import { clock, integer } from "../lib/format.js";
import { bindKey, bindRows } from "../lib/keys.js";
import { badge, empty, failure, field, progress, rolloutColumns, select, sortRows, table, usedColumns } from "../lib/parts.js";
import { link } from "../lib/route.js";

const PAGE = 50;
const PURPOSES = [["", "all"], ["train", "training"], ["eval", "evaluation"]];
const STATES = [["", "all"], ["running", "running"], ["finished", "finished"], ["failed", "failed"]];
const FAILURES = [["", "any"], ...["policy", "environment", "infrastructure", "timeout", "cancelled"].map((name) => [name, name])];
const FILTERS = ["purpose", "state", "failure", "step", "group", "reward_min", "reward_max", "tokens_min", "tokens_max", "text"];
const HIDDEN = ["step", "group", "reward_min", "reward_max", "tokens_min", "tokens_max"];

/** Rollouts by filter, a page at a time; a search continues until a page is full. */
export async function showRollouts(view) {
  const { main, run, signal, query, live } = view;
  const place = h("div", { class: "results" });
  const list = { view, place, search: null };
  const box = searchBox(list);
  fill(main, h("h1", {}, "Rollouts"), filters(list, box), place);
  bindRows(main, signal);
  bindKey("/", "search in rollouts", () => box.focus(), signal);
  if (query.find) {
    view.setQuery({ find: "" });
    box.focus();
  }
  live.on("rollout", () => offerNew(list), signal);
  await start(list);
}

function searchBox(list) {
  const { view } = list;
  return h("input", { type: "search", value: view.query.text ?? "", placeholder: "Search in what was said  ( / )", "aria-label": "Search text", maxlength: 200,
    onchange: (event) => change(list, { text: event.target.value.trim() }) });
}

function filters(list, box) {
  const { query } = list.view;
  const pick = (name, choices) => select(choices, query[name] ?? "", (value) => change(list, { [name]: value }));
  const bound = (name, text, step = "any") => h("input", { type: "number", step, value: query[name] ?? "", placeholder: text, "aria-label": `${name.replace("_", " ")}`, onchange: (event) => change(list, { [name]: event.target.value }) });
  const more = HIDDEN.some((name) => query[name]);
  const group = h("input", { type: "text", value: query.group ?? "", size: 16, onchange: (event) => change(list, { group: event.target.value.trim() }) });
  return h("form", { class: "filters", role: "search", onsubmit: (event) => event.preventDefault() },
    h("div", { class: "bar" }, box, field("Purpose", pick("purpose", PURPOSES)), field("State", pick("state", STATES)), field("Failure", pick("failure", FAILURES))),
    h("details", { open: more }, h("summary", {}, "Step, group, reward, length"),
      h("div", { class: "bar" }, field("Step", bound("step", "any", 1)), field("Group", group), range("Reward", bound("reward_min", "from"), bound("reward_max", "to")), range("Tokens", bound("tokens_min", "from", 1), bound("tokens_max", "to", 1)))),
    h("p", { class: "more" }, h("a", { href: link(list.view.run, "rollouts"), class: "clear" }, "Clear all filters")));
}

function range(name, from, to) {
  return h("fieldset", { class: "field range" }, h("legend", {}, name), from, h("span", { "aria-hidden": "true" }, "–"), to);
}

function change(list, changes) {
  list.view.setQuery(changes);
  start(list).catch((error) => {
    if (error.name !== "AbortError") fill(list.place, failure(error));
  });
}

/** Show the first page; a search that still runs is stopped. */
async function start(list) {
  list.search?.abort();
  list.search = new AbortController();
  list.view.signal.addEventListener("abort", () => list.search.abort());
  Object.assign(list, { rows: [], next: "", searched: 0 });
  fill(list.place, progress("Reading rollouts"));
  await readPage(list);
}

async function readPage(list) {
  const { view, search } = list;
  const wanted = list.rows.length + PAGE;
  const given = Object.fromEntries(FILTERS.map((name) => [name, view.query[name] ?? ""]));
  do {
    const page = await get(["runs", view.run, "rollouts"], { ...given, cursor: list.next, limit: PAGE }, { signal: search.signal });
    if (search.signal.aborted) return;
    take(list, page);
    draw(list, list.next !== null && list.rows.length < wanted);
  } while (list.next !== null && list.rows.length < wanted);
  announce(`${integer(list.rows.length)} rollouts shown`);
}

function take(list, page) {
  list.rows.push(...page.rows);
  list.next = page.next ?? null;
  list.total = page.total;
  list.searched = page.searched ?? list.searched;
  list.note = page.note;
}

function draw(list, searching) {
  const { rows, place, note } = list;
  fill(place, counted(list), note ? h("p", { class: "cure" }, note) : null, rows.length ? tableOf(list, searching) : searching ? null : empty("No rollout like this."), searching ? searchState(list) : moreButton(list));
}

/** The rows that were read; a heading sorts these, not all of the run. */
function tableOf(list, searching) {
  const { query, setQuery } = list.view;
  const columns = columnsOf(list);
  const sorted = query.by ? { name: query.by, down: query.down !== "0" } : null;
  const onSort = (name) => {
    setQuery({ by: name, down: sorted?.name === name && sorted.down ? "0" : "1" });
    draw(list, searching);
  };
  return table("Rollouts", columns, sortRows(list.rows, columns, sorted), { sorted, onSort });
}

function columnsOf({ view, rows }) {
  const columns = rolloutColumns(view.run, backTo(view.query));
  const state = { name: "state", title: "State", value: (row) => row.state, cell: (row) => (row.state === "finished" ? "finished" : badge(row.state)) };
  const start = { name: "start", title: "Started", numeric: true, value: (row) => row.start, cell: (row) => clock(row.start) };
  const group = { name: "group_id", title: "Group", style: "groupid", value: (row) => row.group_id, cell: (row) => (row.group_id ? h("a", { class: "mono quiet", title: row.group_id, href: link(view.run, "rollouts", null, { group: row.group_id }) }, row.group_id) : "–") };
  const purpose = { name: "purpose", title: "Purpose", value: (row) => row.purpose, cell: (row) => PURPOSES.find(([name]) => name === row.purpose)?.[1] ?? "–" };
  return usedColumns([columns[0], purpose, state, ...columns.slice(1), group, start], rows);
}

/** A found text is looked for again in the rollout that is opened. */
function backTo(query) {
  return query.text ? { find: query.text } : {};
}

function counted({ view, rows, total, next, searched }) {
  if (!rows.length) return null;
  const filtered = FILTERS.some((name) => view.query[name]);
  const rest = next === null ? ", which is all" : filtered ? `; ${integer(searched)} of ${integer(total)} searched` : ` of ${integer(total)}`;
  return h("p", { class: "quiet count" }, `${integer(rows.length)} rollouts${rest}`);
}

function searchState(list) {
  return h("div", { class: "bar" }, progress(`Searched ${integer(list.searched)}${list.total ? ` of ${integer(list.total)}` : ""} rollouts`, list.searched, list.total),
    h("button", { class: "button", onclick: () => {
      list.search.abort();
      draw(list, false);
    } }, "Stop"));
}

function moreButton(list) {
  if (list.next === null) return null;
  return h("button", { class: "button wide", onclick: async (event) => {
    event.currentTarget.disabled = true;
    await readPage(list).catch((error) => error.name === "AbortError" || list.place.append(failure(error)));
  } }, "Show more");
}

function offerNew(list) {
  if (list.place.querySelector(".fresh")) return;
  list.place.prepend(h("button", { class: "button fresh", onclick: () => change(list, {}) }, "Newer rollouts have arrived: show them"));
}
