// Two attempts at one task, side by side: what they share is folded, what differs is marked.

import { get } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { firstLine, fixed, integer, shortId } from "../lib/format.js";
import { bindKey, bindRows } from "../lib/keys.js";
import { empty, facts, loading, select } from "../lib/parts.js";
import { link } from "../lib/route.js";
import { alignParts, wordDiff } from "../lib/word_diff.js";

const LONGEST = 20_000;

/** The rollouts `a` and `b` of the link. */
export async function showDiff(view) {
  const { main, run, query, signal } = view;
  const place = h("div");
  fill(main, h("h1", {}, "Compare"), place);
  if (!query.a || !query.b) return void fill(place, empty("Open a group and choose Compare there."));
  const read = (id) => get(["runs", run, "rollouts", id], {}, { signal });
  const [a, b] = await loading(place, "Reading both rollouts", () => Promise.all([read(query.a), read(query.b)]));
  bindMembers(view, a);
  bindRows(main, signal);
  const rows = alignParts(partsOf(a), partsOf(b));
  const same = rows.filter((row) => row.same).length;
  fill(place, h("div", { class: "pair" }, sideHead(view, "a", a), sideHead(view, "b", b)),
    h("p", { class: "quiet" }, `${integer(same)} of ${integer(rows.length)} parts are equal.`), rows.map(rowOf));
}

function partsOf(read) {
  return read.turns.flatMap((turn) => turn.parts);
}

function sideHead(view, side, read) {
  const { run, query } = view;
  const choices = (read.group?.members ?? []).map((one) => [one.rollout_id, `${shortId(one.rollout_id)} · ${fixed(one.reward)}`]);
  if (!choices.some(([id]) => id === query[side])) choices.unshift([query[side], shortId(query[side])]);
  const { row } = read;
  return h("section", { class: "side", "aria-label": `Rollout ${side}` },
    select(choices, query[side], (id) => (location.hash = link(run, "diff", null, { ...query, [side]: id })), { "aria-label": `Rollout ${side}` }),
    facts([["Reward", fixed(row.reward)], ["Tokens", integer(row.tokens)], ["Turns", integer(row.turns)], ["Ended", row.failure ?? row.finish], ["Advantage", fixed(row.advantage)]]),
    h("p", { class: "more" }, h("a", { href: link(run, "rollouts", query[side]) }, "Open"), row.step ? " · " : null, row.step ? h("a", { href: link(run, "steps", row.step, { group: row.group_id }) }, `Its group in step ${integer(row.step)}`) : null));
}

function bindMembers({ run, query, signal }, read) {
  const ids = (read.group?.members ?? []).map((one) => one.rollout_id).filter((id) => id !== query.a);
  const go = (by) => {
    const next = ids[ids.indexOf(query.b) + by];
    if (next) location.hash = link(run, "diff", null, { ...query, b: next });
  };
  bindKey("[", "compare with the rollout before", () => go(-1), signal);
  bindKey("]", "compare with the next rollout", () => go(1), signal);
}

function rowOf(row) {
  if (row.same) return sharedPart(row.a);
  const runs = row.a && row.b && row.a.role === row.b.role ? wordDiff(row.a.text.slice(0, LONGEST), row.b.text.slice(0, LONGEST)) : null;
  return h("div", { class: "pair" }, sidePart(row.a, runs?.[0], "of-a"), sidePart(row.b, runs?.[1], "of-b"));
}

function sharedPart(part) {
  return h("details", { class: "shared" }, h("summary", { "data-row": true, dir: "auto" }, h("span", { class: "role" }, part.role), ` ${firstLine(part.text, 120)}`), h("div", { class: "text", dir: "auto" }, part.text.slice(0, LONGEST)));
}

function sidePart(part, runs, style) {
  if (!part) return h("div", { class: "side side-empty" }, h("span", { class: "quiet" }, "nothing here"));
  const text = runs ? runs.map(([words, shared]) => (shared ? words : h("mark", { class: style }, words))) : part.text.slice(0, LONGEST);
  const kind = part.kind === "text" ? null : h("span", { class: "quiet" }, ` ${part.kind.replaceAll("_", " ")}`);
  const cut = part.more || part.text.length > LONGEST ? h("p", { class: "quiet" }, "Cut here; open the rollout for the rest.") : null;
  return h("div", { class: "side" }, h("div", { class: "parthead" }, h("span", { class: "role" }, part.role), kind), h("div", { class: "text", dir: "auto" }, text), cut);
}
