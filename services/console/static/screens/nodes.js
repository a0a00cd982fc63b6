// The nodes over time: what each did, when it was lent and why, when weights arrived.

import { get, isBundle } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { clock, duration, integer, number, percent } from "../lib/format.js";
import { empty, loading, panel, table } from "../lib/parts.js";
import { axisOf, laneOf, spansWithin } from "../lib/timeline.js";

const ACTIVITIES = ["rollout", "training", "scoring", "lent", "switching", "idle", "stopped"];
const MOST_AUDIT = 200;

/** Lanes of all nodes over one range of time; the range is in the link. */
export async function showNodes(view) {
  const { main, run, signal, live } = view;
  const place = h("div");
  const trace = `api/runs/${encodeURIComponent(run)}/nodes/trace.json`;
  fill(main, h("div", { class: "title" }, h("h1", {}, "Nodes"), isBundle() ? null : h("a", { class: "button", href: trace, download: `${run}-nodes.json` }, "Chrome trace")), place);
  const state = { view, place };
  const renew = async () => {
    state.data = await get(["runs", run, "nodes"], {}, { signal });
    if (!signal.aborted) draw(state);
  };
  await loading(place, "Reading the nodes", renew);
  live.on("status", () => renew().catch(() => null), signal);
}

function extent(nodes) {
  const now = Date.now() / 1000;
  const spans = nodes.flatMap((node) => node.spans);
  if (!spans.length) return [now - 60, now];
  return [spans.reduce((least, span) => Math.min(least, span.start), Infinity), spans.reduce((last, span) => Math.max(last, span.end ?? now), 0)];
}

function draw(state) {
  const { view, place, data } = state;
  const nodes = data.nodes ?? [];
  if (!nodes.length) return void fill(place, empty(data.note ?? "No node has registered."));
  const whole = extent(nodes);
  const from = Math.max(whole[0], Number(view.query.from || whole[0]));
  const to = Math.min(whole[1], Number(view.query.to || whole[1]));
  const range = to > from ? [from, to] : whole;
  const details = h("p", { class: "inspector", "aria-live": "polite" }, "Point at a span for its reason.");
  const zoom = (next) => {
    view.setQuery(next ? { from: next[0].toFixed(1), to: next[1].toFixed(1) } : { from: "", to: "" });
    draw(state);
  };
  fill(place, zoomBar(range, whole, zoom), legend(nodes), lanes(nodes, range, details, zoom), details, audit(data.audit ?? []));
}

function zoomBar([from, to], whole, zoom) {
  const [middle, half] = [(from + to) / 2, (to - from) / 2];
  const step = (text, name, next) => h("button", { class: "button", "aria-label": name, title: name, onclick: () => zoom(next) }, text);
  return h("div", { class: "bar" }, step("+", "Zoom in", [middle - half / 2, middle + half / 2]), step("−", "Zoom out", [middle - 2 * half, middle + 2 * half]), step("‹", "Earlier", [from - half, to - half]), step("›", "Later", [from + half, to + half]),
    step("Whole", "Whole time", null), h("span", { class: "quiet num" }, `${clock(from)} to ${clock(to)}, ${duration(to - from)} of ${duration(whole[1] - whole[0])}`));
}

function legend(nodes) {
  const seen = new Set(nodes.flatMap((node) => node.spans.map((span) => span.activity)));
  const entries = ACTIVITIES.filter((name) => seen.has(name)).map((name) => h("span", {}, h("span", { class: `swatch act-${name}`, "aria-hidden": "true" }), name));
  return h("p", { class: "legend" }, entries, nodes.some((node) => node.arrivals?.length) ? h("span", {}, h("span", { class: "swatch act-arrival", "aria-hidden": "true" }), "weights arrive") : null);
}

function lanes(nodes, range, details, zoom) {
  const rows = nodes.map((node) => {
    const shares = sharesOf(node, range);
    return h("div", { class: "lane" }, h("div", { class: "lanehead" }, h("span", { class: "mono", title: node.id }, node.id), h("span", { class: "quiet" }, shares[0] ? `${shares[0][0]} ${percent(shares[0][1])}` : "")),
      laneOf(node, range, `${node.id}, now ${node.state}: ${shares.map(([name, share]) => `${name} ${percent(share)}`).join(", ")}`, (text) => fill(details, text), zoom));
  });
  return h("section", { class: "lanes", "aria-label": "Timeline" }, h("div", { class: "lane axislane" }, h("div", { class: "lanehead" }), axisOf(range)), rows);
}

function sharesOf(node, [from, to]) {
  const sums = {};
  for (const span of spansWithin(node.spans, [from, to])) sums[span.activity] = (sums[span.activity] ?? 0) + span.to - span.from;
  return Object.entries(sums).map(([name, sum]) => [name, sum / (to - from)]).sort((one, other) => other[1] - one[1]);
}

function audit(entries) {
  const columns = [
    { title: "When", numeric: true, cell: (entry) => clock(entry.time) },
    { title: "What", wide: true, cell: (entry) => (entry.times > 1 ? `${entry.text} (${integer(entry.times)} times)` : entry.text) },
    { title: "Why", wide: true, cell: (entry) => entry.reason ?? "" },
    { title: "Numbers", cell: (entry) => numbersOf(entry.numbers) },
  ];
  const newest = withoutRepeats([...entries].sort((one, other) => other.time - one.time)).slice(0, MOST_AUDIT);
  return panel("Decisions", newest.length ? table("Decisions of the scheduler, newest first", columns, newest) : empty("No decision was recorded."));
}

/** Entries of which those that follow each other with the same words are one, with their number. */
function withoutRepeats(entries) {
  const kept = [];
  for (const entry of entries) {
    const last = kept.at(-1);
    if (last && last.text === entry.text && last.reason === entry.reason) last.times += 1;
    else kept.push({ ...entry, times: 1 });
  }
  return kept;
}

/** "remaining 12, freed 2" of an object of numbers. */
function numbersOf(numbers) {
  return Object.entries(numbers ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`).join(", ");
}
