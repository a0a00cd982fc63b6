// One rollout: its place in the group, the conversation, and its tokens.

import { getOnce, get } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { clock, duration, fixed, integer, versions } from "../lib/format.js";
import { bindKey, bindRows } from "../lib/keys.js";
import { badge, choice, facts, loading } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { conversation } from "./conversation.js";
import { showTokens } from "./tokens.js";

/** A rollout by its id; `tab`, `turn`, `from` and `color` are in the link. */
export async function showTranscript(view) {
  const { main, run, id, signal, query, live } = view;
  fill(main, h("h1", { class: "mono" }, id));
  const place = main.appendChild(h("div"));
  const read = await loading(place, "Reading the rollout", () => get(["runs", run, "rollouts", id], {}, { signal }));
  const tab = h("div", { class: "tab" });
  fill(main, title(view, read), read.failure ? failed(read.failure) : null, members(view, read.group), rowFacts(run, read), tabs(view, read, tab), tab);
  bindMembers(view, read.group);
  bindRows(main, signal);
  drawTab(view, read, tab);
  if (read.row.state === "running") live.on("rollout", (event) => event.rollout_id === id && showTranscript(view), signal);
}

function title({ id }, { row }) {
  return h("div", { class: "title" }, h("h1", { class: "mono" }, id), row.state ? badge(row.state) : null,
    row.reward === null || row.reward === undefined ? null : h("span", { class: "reward" }, `reward ${fixed(row.reward)}`));
}

function failed(failure) {
  const text = typeof failure === "string" ? failure : [failure.class, failure.message].filter(Boolean).join(": ");
  return h("p", { class: "failure" }, h("strong", {}, "Failed. "), text);
}

function members({ run, id, query }, group) {
  if (!group?.members?.length) return null;
  const others = { tab: query.tab, color: query.color };
  const links = group.members.map((one) => h("li", {}, h("a", { href: link(run, "rollouts", one.rollout_id, others), "aria-current": one.rollout_id === id ? "true" : null, class: "member", title: one.rollout_id }, fixed(one.reward))));
  const other = bestOther(group.members, id);
  return h("nav", { class: "members", "aria-label": "Rollouts of this group" }, h("span", { class: "quiet" }, "Group"), h("ul", {}, links),
    other ? h("a", { href: link(run, "diff", null, { a: id, b: other.rollout_id }) }, "Compare") : null);
}

/** Whose reward differs most from this one's. */
function bestOther(all, id) {
  const own = all.find((one) => one.rollout_id === id)?.reward ?? 0;
  return all.filter((one) => one.rollout_id !== id).sort((one, other) => Math.abs((other.reward ?? 0) - own) - Math.abs((one.reward ?? 0) - own))[0];
}

function bindMembers({ run, id, query, signal }, group) {
  const ids = (group?.members ?? []).map((one) => one.rollout_id);
  const go = (by) => {
    const next = ids[ids.indexOf(id) + by];
    if (next) location.hash = link(run, "rollouts", next, { tab: query.tab, color: query.color });
  };
  bindKey("[", "rollout before in the group", () => go(-1), signal);
  bindKey("]", "next rollout of the group", () => go(1), signal);
}

/** Rewards by name, when there are several. */
function named(rewards = []) {
  return rewards.length > 1 ? rewards.map((one) => [`Reward ${one.name}`, fixed(one.value)]) : [];
}

function rowFacts(run, { row, labels, task, rewards, turns }) {
  const step = row.step === null || row.step === undefined ? null : h("a", { href: link(run, "steps", row.step, { group: row.group_id }) }, integer(row.step));
  const given = facts([["Step", step], ...named(rewards), ["Ended", row.failure ?? row.finish], ["Tokens", integer(row.tokens)], ["Trained", integer(row.trained_tokens)], ["Turns", integer(row.turns)],
    ["Tool calls", integer(row.tool_calls)], ["Versions", versions(row.version_from, row.version_to)], ["Staleness", integer(row.staleness)], ["Advantage", fixed(row.advantage)],
    ["Ratio", fixed(row.ratio, 3)], ["Log-prob gap", fixed(row.logprob_diff, 4)], ["Took", duration(row.seconds)], ["Started", clock(row.start)]]);
  return h("div", { class: "stack" }, given, task ? taskOf(task, turns) : null, labels && Object.keys(labels).length ? facts(Object.entries(labels)) : null);
}

/** What the agent was given; open while no prompt is recorded. */
function taskOf(task, turns) {
  const hasPrompt = turns.some((turn) => turn.parts.length);
  return h("details", { class: "tasktext", open: !hasPrompt }, h("summary", {}, "Task"), h("pre", { dir: "auto" }, task));
}

function tabs(view, read, place) {
  return h("div", { class: "bar" }, choice("View", [["", "Conversation"], ["tokens", "Tokens"]], view.query.tab ?? "", (tab) => {
    view.setQuery({ tab });
    drawTab(view, read, place);
  }));
}

function drawTab(view, read, place) {
  view.leaveTab?.abort();
  view.leaveTab = new AbortController();
  view.signal.addEventListener("abort", () => view.leaveTab.abort());
  if (view.query.tab === "tokens") return void showTokens({ ...view, signal: view.leaveTab.signal }, read, place).catch((error) => error.name === "AbortError" || undefined);
  const readText = (turn, part, onProgress) => wholeText(view, turn, part, onProgress);
  const openTokens = (turn, from) => {
    view.setQuery({ tab: "tokens", turn: turn.turn_id, from });
    place.previousElementSibling.querySelectorAll("button").forEach((button, index) => button.setAttribute("aria-pressed", String(index === 1)));
    drawTab(view, read, place);
  };
  fill(place, conversation(read, { find: view.query.find ?? "", readText, openTokens }));
}

/** The text of a part that was cut, from its tokens. */
async function wholeText({ run, id, signal }, turn, part, onProgress) {
  const texts = [];
  const end = part.start + part.count;
  for (let start = part.start; start < end; start += 4096) {
    const window = await getOnce(["runs", run, "rollouts", id, "tokens"], { turn: turn.turn_id, start, count: Math.min(4096, end - start) }, { signal });
    texts.push(...window.texts);
    onProgress(Math.min(end, start + 4096) - part.start, part.count);
  }
  return texts.join("");
}
