// First of all: what the run does now, and what waits for what.

import { get, isBundle, pathOf } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { clock, duration, fixed, integer, number, percent } from "../lib/format.js";
import { badge, empty, loading, panel, tile, withCode } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { LineChart } from "../lib/chart.js";

const REWARD = "reward_mean";

/** The state of a run; renewed whenever the run reports something. */
export async function showOverview(view) {
  const { main, run, signal, live } = view;
  const parts = { head: h("div"), status: h("div", { class: "columns" }), curve: h("div"), logs: h("div") };
  fill(main, parts.head, parts.status, parts.curve, parts.logs);
  fill(parts.head, h("h1", {}, run));
  const renew = async () => draw(view, parts, await get(["runs", run, "overview"], {}, { signal }));
  await loading(parts.status, "Reading the state of the run", renew);
  await drawCurve(view, parts.curve);
  if (!isBundle()) await drawLogs(view, parts.logs);
  const later = settled(renew, signal);
  live.on("status", later, signal);
  const ticking = setInterval(() => tick(main), 1000);
  signal.addEventListener("abort", () => clearInterval(ticking));
  live.on("step", () => later().then(() => drawCurve(view, parts.curve)), signal);
}

/** One renewal at a time; a failed one leaves what is shown. */
function settled(renew, signal) {
  let last = Promise.resolve();
  return () => (last = last.then(() => (signal.aborted ? null : renew())).catch(() => null));
}

function draw({ run }, parts, overview) {
  fill(parts.head, h("h1", {}, run, " ", badge(overview.state)), overview.note ? h("p", { class: "quiet" }, overview.note) : null, signals(run, overview.signals ?? {}));
  fill(parts.status, h("div", { class: "stack" }, waiting(overview), warnings(overview.warnings ?? [])), h("div", { class: "stack" }, activities(overview), queues(overview.queues ?? [])));
}

/** How long ago something began; it goes on by itself. */
function sinceThen(time) {
  return h("span", { "data-since": time }, duration(Date.now() / 1000 - time));
}

function tick(main) {
  for (const place of main.querySelectorAll("[data-since]")) place.textContent = duration(Date.now() / 1000 - Number(place.dataset.since));
}

function signals(run, given) {
  const heldout = given.heldout;
  const range = heldout && known(heldout.low) ? `${fixed(heldout.low)} to ${fixed(heldout.high)}, step ${heldout.step}` : null;
  const tiles = [
    known(given.reward) && tile("Reward", fixed(given.reward)),
    heldout && known(heldout.mean) && tile("Held-out", fixed(heldout.mean), range),
    known(given.share_equal_groups) && tile("Equal groups", percent(given.share_equal_groups), "all rewards the same"),
    known(given.entropy) && tile("Entropy", number(given.entropy)),
    known(given.length) && tile("Answer", `${number(given.length)} tokens`),
  ];
  return h("dl", { class: "tiles" }, tiles);
}

function known(value) {
  return value !== null && value !== undefined;
}

function waiting({ waiting: cards = [] }) {
  const list = cards.map((card) =>
    h("li", { class: card.normal ? "card" : "card card-bad" },
      h("h3", {}, withCode(card.what)),
      card.for ? h("p", {}, card.for) : null,
      h("dl", { class: "facts" },
        fact("Since", card.since ? [sinceThen(card.since), ` (${clock(card.since)})`] : null),
        fact("Attempts", card.attempts ? integer(card.attempts) : null),
        fact("Last error", card.last_error),
        fact("Next", card.next_action ? withCode(card.next_action) : null))));
  return panel("Waiting", list.length ? h("ul", { class: "cards" }, list) : empty("Nothing waits."));
}

function fact(name, value) {
  return known(value) && value !== "" ? h("div", {}, h("dt", {}, name), h("dd", {}, value)) : null;
}

function activities({ activities: list = [], lives = [] }) {
  const last = lives.at(-1);
  const rows = list.map((one) => h("li", {}, h("span", { class: "who" }, one.who), h("span", {}, one.what), h("span", { class: "num" }, one.since ? sinceThen(one.since) : "")));
  return panel("Now", rows.length ? h("ul", { class: "lines" }, rows) : empty(last?.end ? `The run has ended: ${[last.state, last.reason].filter(Boolean).join(", ")}, ${clock(last.end)}.` : "No process reports work."));
}

function queues(list) {
  const rows = list.map((queue) => h("tr", {}, h("th", { scope: "row" }, queue.name), h("td", { class: "num" }, integer(queue.count)), h("td", { class: "num quiet" }, queue.limit ? `of ${integer(queue.limit)}` : "", queue.unit ? ` ${queue.unit}` : ""), h("td", { class: "meter" }, queue.limit ? meter(queue) : null)));
  const head = h("thead", { class: "unseen" }, h("tr", {}, ["Queue", "Count", "Limit", "Share"].map((name) => h("th", { scope: "col" }, name))));
  return rows.length ? panel("Queues", h("table", { class: "queues" }, head, h("tbody", {}, rows))) : null;
}

function meter(queue) {
  const element = h("meter", { min: 0, max: queue.limit, "aria-label": `${queue.name}: ${queue.count} of ${queue.limit}` });
  element.value = Math.min(queue.count, queue.limit);
  return element;
}

function warnings(list) {
  const items = list.map((one) => h("li", { class: "card card-warn" }, h("h3", {}, one.name), h("p", {}, one.text), one.cure ? h("p", { class: "cure" }, withCode(one.cure)) : null));
  return items.length ? panel("Warnings", h("ul", { class: "cards" }, items)) : null;
}

/** The end of each log opens as plain text. */
async function drawLogs({ run, signal }, place) {
  const { logs } = await get(["runs", run, "logs"], {}, { signal }).catch(() => ({ logs: [] }));
  if (!logs.length || signal.aborted) return;
  const items = logs.map((log) => h("li", {}, h("a", { href: `api/${pathOf(["runs", run, "logs", log.name])}`, target: "_blank" }, log.name), " ", h("span", { class: "quiet num" }, `${integer(Math.ceil(log.bytes / 1024))} KiB, ${clock(log.time)}`)));
  fill(place, panel("Logs", h("ul", { class: "logs" }, items)));
}

async function drawCurve({ run, signal }, place) {
  const data = await get(["runs", run, "steps"], { names: REWARD }, { signal }).catch(() => null);
  if (!data?.metrics?.[REWARD] || !data.steps.length || signal.aborted) return;
  place.chart ??= newCurve(run, place, signal);
  fill(place.querySelector("h2"), `Reward, up to step ${integer(data.steps.at(-1))}`);
  place.chart.draw(data.steps, [{ name: run, values: data.metrics[REWARD] }], data.evaluations ?? []);
}

function newCurve(run, place, signal) {
  const figure = h("div", { class: "chart" });
  fill(place, panel("Reward", figure, h("p", { class: "more" }, h("a", { href: link(run, "curves") }, "All curves"))));
  return new LineChart(figure, { title: "Reward", signal, height: 170, onPoint: (step) => (location.hash = link(run, "steps", step)) });
}
