// One optimizer step: its metrics, its groups with their spread, and their samples.

import { get } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { fixed, firstLine, integer, number } from "../lib/format.js";
import { histogram } from "../lib/histogram.js";
import { bindKey, bindRows } from "../lib/keys.js";
import { badge, choice, empty, field, loading, rolloutColumns, select, sortRows, table, usedColumns } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { rewardDots } from "../lib/reward_dots.js";

const ORDERS = [["", "As trained"], ["spread", "Widest spread"], ["low", "Lowest reward"], ["high", "Highest reward"]];
const SHOWN = [["", "All"], ["different", "Different rewards"], ["equal", "Equal rewards"], ["discarded", "Not trained"]];
const KEY_METRICS = ["reward_mean", "completion_tokens_mean", "entropy", "loss", "grad_norm", "staleness_mean", "train_rollout_logprob_abs_diff", "seconds.wait", "seconds.train"];

/** A step by its number; without one, the newest. */
export async function showStep(view) {
  const { main, run, id, signal } = view;
  fill(main, h("h1", {}, "Steps"));
  const place = main.appendChild(h("div"));
  const { steps, num_steps: planned } = await loading(place, "Reading the steps", () => get(["runs", run, "steps"], { names: "" }, { signal }));
  if (!steps.length) return void fill(place, empty("No optimizer step yet. The overview says what the run waits for."));
  const step = id === null ? steps.at(-1) : Number(id);
  bindSteps(view, steps, step);
  fill(main, heading(run, steps, step, planned), place);
  const data = await loading(place, `Reading step ${step}`, () => get(["runs", run, "steps", String(step)], {}, { signal }));
  drawStep(view, place, step, data);
  bindRows(main, signal);
  view.live.on("step", (made) => made.step && fill(main.querySelector("[data-newest]"), madeOf(made.step, planned)), signal);
}

function neighbours(steps, step) {
  return [steps.filter((one) => one < step).at(-1), steps.find((one) => one > step)];
}

function bindSteps({ run, signal }, steps, step) {
  const [before, after] = neighbours(steps, step);
  const go = (to) => to !== undefined && (location.hash = link(run, "steps", to));
  bindKey("[", "step before", () => go(before), signal);
  bindKey("]", "next step", () => go(after), signal);
}

/** How far the run is; `planned` is not known of every run. */
function madeOf(newest, planned) {
  return `${integer(newest)}${planned ? ` of ${integer(planned)}` : ""} steps made`;
}

function heading(run, steps, step, planned) {
  const [before, after] = neighbours(steps, step);
  const arrow = (to, text, name) => (to === undefined ? h("span", { class: "button off", "aria-hidden": "true" }, text) : h("a", { class: "button", href: link(run, "steps", to), "aria-label": name }, text));
  const goTo = h("input", { type: "number", min: steps[0], max: steps.at(-1), value: step, "aria-label": "Go to step", onchange: (event) => (location.hash = link(run, "steps", Number(event.target.value))) });
  return h("div", { class: "title" }, h("h1", {}, `Step ${integer(step)}`), arrow(before, "‹", "Step before"), goTo, arrow(after, "›", "Next step"), h("span", { class: "quiet", "data-newest": true }, madeOf(steps.at(-1), planned)));
}

function drawStep(view, place, step, data) {
  const groups = h("div", { class: "groups" });
  const note = data.recorded === false && data.groups?.length ? h("p", { class: "quiet" }, "Advantages, ratios and staleness of this step are not recorded: the trainer keeps those of its newest steps (recorded_steps in [trainer.tracking]).") : null;
  fill(place, metricsOf(data.metrics ?? {}), note, pictures(view, step, data), groupsBar(view, data, groups), groups);
  drawGroups(view, data, groups);
}

function metricsOf(metrics) {
  const names = Object.keys(metrics).filter((name) => metrics[name] !== null && name !== "time");
  const first = KEY_METRICS.filter((name) => names.includes(name));
  const head = (first.length >= 3 ? first : names).slice(0, 9);
  const row = (name) => h("div", {}, h("dt", {}, name), h("dd", { class: "num" }, number(metrics[name], 4)));
  const all = h("details", {}, h("summary", {}, `All ${names.length} metrics`), h("dl", { class: "metrics" }, names.sort().map(row)));
  return h("section", { "aria-label": "Metrics" }, h("dl", { class: "facts" }, head.map(row)), names.length > head.length ? all : null);
}

function pictures({ run }, step, { rewards = [], lengths = {} }) {
  const ofRewards = (bin) => link(run, "rollouts", null, { step, reward_min: round(bin.low), reward_max: round(bin.high) });
  const shown = [{ name: "trained", values: lengths.trained ?? [] }, { name: "generated meanwhile", values: lengths.generated ?? [] }].filter((one) => one.values.length);
  return h("div", { class: "columns" }, histogram("Rewards", [{ name: "samples", values: rewards }], { linkOf: ofRewards }), shown.length ? histogram("Lengths in tokens", shown) : null);
}

function round(value) {
  return Number(value.toPrecision(6));
}

function groupsBar(view, { groups = [] }, place) {
  const again = (changes) => {
    view.setQuery(changes);
    drawGroups(view, view.data, place);
  };
  view.data = { groups };
  return h("div", { class: "bar" }, h("h2", {}, `${integer(groups.length)} groups`),
    field("Order", select(ORDERS, view.query.order ?? "", (order) => again({ order }))),
    field("Show", choice("Groups shown", SHOWN, view.query.show ?? "", (show) => again({ show }))));
}

function drawGroups(view, { groups = [] }, place) {
  const shown = ordered(groups.filter((group) => isShown(group, view.query.show)), view.query.order);
  fill(place, shown.length ? shown.map((group) => groupOf(view, group)) : empty("No such group in this step."));
}

function isShown(group, show) {
  if (show === "equal") return group.reward_std === 0;
  if (show === "different") return group.reward_std > 0;
  if (show === "discarded") return group.state !== "trained";
  return true;
}

function ordered(groups, order) {
  const key = { spread: (group) => -(group.reward_std ?? -1), low: (group) => group.reward_mean ?? Infinity, high: (group) => -(group.reward_mean ?? -Infinity) }[order];
  return key ? [...groups].sort((one, other) => key(one) - key(other)) : groups;
}

function groupOf(view, group) {
  const open = view.query.group === group.group_id;
  const body = h("div", { class: "samples" });
  const summary = h("summary", { "data-row": true },
    h("span", { class: "task" }, group.task_text ? firstLine(group.task_text, 140) : group.group_id),
    group.state === "trained" ? null : badge(group.state),
    rewardDots(group.samples ?? []),
    h("span", { class: "num spread" }, `${fixed(group.reward_mean)} ± ${fixed(group.reward_std)}`));
  const details = h("details", { class: "group", open, ontoggle: () => {
    if (details.open && !body.firstChild) openSamples(view, group, body);
    if (details.open) view.setQuery({ group: group.group_id });
    else if (view.query.group === group.group_id) view.setQuery({ group: "" });
  } }, summary, body);
  if (open) openSamples(view, group, body);
  return details;
}

/** The samples at once, then their answers: those of all groups would take long to read. */
async function openSamples(view, group, place) {
  drawSamples(view, group, place);
  const { rows } = await get(["runs", view.run, "rollouts"], { group: group.group_id, limit: 500 }, { signal: view.signal }).catch(() => ({ rows: [] }));
  const answers = new Map(rows.map((row) => [row.rollout_id, row.answer]));
  for (const sample of group.samples ?? []) sample.answer = answers.get(sample.rollout_id) ?? null;
  if (!view.signal.aborted) drawSamples(view, group, place);
}

function drawSamples(view, group, place) {
  const { run } = view;
  const samples = group.samples ?? [];
  const columns = usedColumns(rolloutColumns(run), samples);
  const sorted = { name: view.query.sort ?? "reward", down: view.query.down !== "0" };
  const onSort = (name) => {
    view.setQuery({ sort: name, down: sorted.name === name && sorted.down ? "0" : "1" });
    drawSamples(view, group, place);
  };
  fill(place, group.cause ? h("p", { class: "cure" }, `Not trained: ${group.cause}`) : null,
    group.task_text ? h("details", { class: "tasktext" }, h("summary", {}, "Task"), h("pre", { dir: "auto" }, group.task_text)) : null,
    table(`Samples of group ${group.group_id}`, columns, sortRows(samples, columns, sorted), { sorted, onSort }),
    compareLink(run, samples));
}

function compareLink(run, samples) {
  const scored = samples.filter((row) => row.reward !== null && row.reward !== undefined).sort((one, other) => other.reward - one.reward);
  if (scored.length < 2) return null;
  return h("p", { class: "more" }, h("a", { href: link(run, "diff", null, { a: scored[0].rollout_id, b: scored.at(-1).rollout_id }) }, scored[0].reward > scored.at(-1).reward ? "Compare the best with the worst" : "Compare two attempts, whose rewards are equal"));
}
