// Metrics of the steps as curves: chosen by name, smoothed, up to four runs over each other.

import { get } from "../lib/api.js";
import { chartFigure, smooth } from "../lib/chart.js";
import { fill, h } from "../lib/dom.js";
import { choice, empty, field, loading, select } from "../lib/parts.js";
import { link } from "../lib/route.js";

const FIRST = ["reward_mean", "completion_tokens_mean", "entropy", "train_rollout_logprob_abs_diff", "staleness_mean", "grad_norm"];
const MOST_FIRST = 6;
const MOST_BESIDE = 3;

/** The curves of a run; names, other runs, smoothing, x and zoom are in the link. */
export async function showCurves(view) {
  const { main, run, signal, query, live } = view;
  const parts = { controls: h("div", { class: "bar" }), names: h("div"), charts: h("div", { class: "charts" }), note: h("p", { class: "legend" }) };
  fill(main, h("h1", {}, "Curves"), parts.controls, parts.note, h("div", { class: "split" }, parts.names, parts.charts));
  const state = { view, parts, charts: new Map(), runs: [] };
  get(["runs"], {}, { signal }).then((all) => {
    state.runs = all.runs;
    drawControls(state);
  }).catch(() => null);
  const { names } = await loading(parts.charts, "Reading the metrics", () => get(["runs", run, "steps"], { names: "" }, { signal }));
  state.names = names ?? [];
  state.chosen = query.names ? query.names.split(",") : firstOf(state.names);
  drawControls(state);
  drawNames(state);
  await renew(state);
  live.on("step", () => renew(state).catch(() => null), signal);
}

function firstOf(names) {
  const usual = FIRST.filter((name) => names.includes(name));
  return (usual.length >= 2 ? usual : [...usual, ...names.filter((name) => !usual.includes(name))]).slice(0, MOST_FIRST);
}

function drawControls(state) {
  const { view, parts, runs } = state;
  const { query, run } = view;
  const again = (changes) => {
    view.setQuery(changes);
    state.charts.clear();
    renew(state);
  };
  const others = runs.filter((one) => one.id !== run).map((one) => [one.id, one.name ?? one.id]);
  const weight = h("input", { type: "range", min: 0, max: 0.95, step: 0.05, value: query.smooth ?? 0, onchange: (event) => again({ smooth: event.target.value === "0" ? "" : event.target.value }) });
  fill(
    parts.controls,
    field("Over", choice("Horizontal axis", [["step", "Steps"], ["time", "Time"]], query.x ?? "step", (x) => again({ x: x === "step" ? "" : x, from: "", to: "" }))),
    field("Smoothing", weight),
    others.length ? besides(others, besideOf(query), (chosen) => {
      again({ with: chosen.join(",") });
      drawControls(state);
    }) : null,
    h("button", { class: "button", onclick: () => again({ from: "", to: "" }) }, "Whole range"),
  );
}

function besideOf(query) {
  return query.with ? query.with.split(",").slice(0, MOST_BESIDE) : [];
}

/** A select for each run that lies beside, and an empty one for the next. */
function besides(others, chosen, onChange) {
  const places = chosen.length < Math.min(MOST_BESIDE, others.length) ? [...chosen, ""] : chosen;
  const one = (value, index) => {
    const free = others.filter(([id]) => id === value || !chosen.includes(id));
    const changed = (id) => onChange(places.toSpliced(index, 1, id).filter(Boolean));
    return select([["", index ? "no further run" : "no other run"], ...free], value, changed, { "aria-label": `Beside, run ${index + 2}` });
  };
  return h("span", { class: "field", role: "group", "aria-label": "Beside" }, h("span", {}, "Beside"), places.map(one));
}

function drawNames(state) {
  const { parts } = state;
  const list = h("ul", { class: "names" });
  const search = h("input", { type: "search", placeholder: "Filter", "aria-label": "Filter metrics", oninput: () => drawList() });
  const drawList = () => fill(list, state.names.filter((name) => name.includes(search.value)).map((name) => h("li", {}, nameBox(state, name))));
  drawList();
  const summary = h("summary", {}, `Metrics (${state.names.length})`);
  fill(parts.names, h("details", { class: "picker", open: matchMedia("(min-width: 900px)").matches }, summary, search, list));
}

function nameBox(state, name) {
  const box = h("input", { type: "checkbox", checked: state.chosen.includes(name), onchange: () => {
    state.chosen = box.checked ? [...state.chosen, name] : state.chosen.filter((one) => one !== name);
    state.view.setQuery({ names: state.chosen.join(",") });
    renew(state);
  } });
  return h("label", { class: "check" }, box, h("span", {}, name));
}

async function renew(state) {
  const { view, chosen, parts } = state;
  const { run, signal, query } = view;
  if (!chosen.length) return void fill(parts.charts, empty(state.names.length ? "Choose a metric." : "No step yet."));
  const read = (one) => get(["runs", one, "steps"], { names: chosen.join(",") }, { signal });
  const [own, ...others] = await Promise.all([run, ...besideOf(query)].map(read));
  if (!signal.aborted) drawCharts(state, own, others);
}

function drawCharts(state, own, others) {
  const { view, parts, chosen } = state;
  for (const name of [...state.charts.keys()]) if (!chosen.includes(name)) state.charts.delete(name);
  for (const name of chosen) if (!state.charts.has(name)) state.charts.set(name, newChart(state, name));
  const figures = chosen.map((name) => state.charts.get(name).figure);
  if (figures.some((figure, index) => parts.charts.children[index] !== figure) || parts.charts.children.length !== figures.length) fill(parts.charts, figures);
  const hasStops = view.query.x === "time" && own.stops?.length;
  fill(parts.note, hasStops ? h("span", {}, h("span", { class: "swatch band", "aria-hidden": "true" }), `${view.run} was stopped`) : null);
  for (const name of chosen) drawOne(view, state.charts.get(name).chart, name, own, others);
}

function newChart(state, name) {
  const { view } = state;
  const onPoint = view.query.x === "time" ? null : (step) => (location.hash = link(view.run, "steps", step));
  const onZoom = (range) => zoomAll(state, name, range);
  return chartFigure(name, `${view.run}-${name}`, { signal: view.signal, sync: "curves", time: view.query.x === "time", onPoint, onZoom });
}

/** What is zoomed in one chart is zoomed in all, and in the link. */
function zoomAll(state, from, range) {
  state.view.setQuery(range ? { from: range[0].toFixed(2), to: range[1].toFixed(2) } : { from: "", to: "" });
  for (const [name, { chart }] of state.charts) if (name !== from) chart.again(range);
}

function drawOne({ run, query }, chart, name, own, others) {
  const over = query.x === "time" ? "time" : "steps";
  const weight = Number(query.smooth ?? 0);
  const beside = besideOf(query).map((id, index) => [id, others[index]]);
  const series = [[run, own], ...beside].filter(([, data]) => data?.metrics?.[name]);
  const drawn = series.map(([label, data]) => ({ name: label, x: data[over], values: smooth(data.metrics[name], weight), raw: weight && !others.length ? data.metrics[name] : null }));
  if (!drawn.length) return;
  const evaluations = name === "reward_mean" && over === "steps" ? own.evaluations ?? [] : [];
  chart.stops = own.stops ?? [];
  const range = query.from && query.to ? [Number(query.from), Number(query.to)] : null;
  chart.draw(drawn[0].x, drawn, evaluations, range);
}
