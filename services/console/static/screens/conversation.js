// The turns of a rollout as a conversation: reasoning and tool results folded, long texts cut.

import { fill, h } from "../lib/dom.js";
import { duration, firstLine, integer } from "../lib/format.js";
import { textBlock } from "../lib/long_text.js";
import { empty, failure, progress } from "../lib/parts.js";

const FOLDED = new Set(["reasoning", "tool_result"]);
const NAMES = { text: "", reasoning: "reasoning", tool_call: "tool call", tool_result: "tool result" };

/** All turns in order; `readText` reads a cut part whole, `openTokens` shows a part's tokens. */
export function conversation(read, options) {
  if (!read.turns.length) return empty(read.row.state === "running" ? "No turn has begun." : "It ended before its first turn.");
  return h("ol", { class: "turns" }, read.turns.map((turn, index) => turnOf(turn, index, read, options)));
}

function turnOf(turn, index, read, options) {
  const before = read.turns[index - 1];
  const forks = turn.prefix_turn && before && turn.prefix_turn !== before.turn_id;
  const note = [`turn ${index + 1}`, turn.finish, `${integer(turn.num_tokens)} tokens`, turn.seconds ? duration(turn.seconds) : null].filter(Boolean).join(" · ");
  return h("li", { class: "turn" },
    h("h2", { class: "turnhead" }, note, forks ? h("span", { class: "tone-warn" }, ` · continues turn ${1 + read.turns.findIndex((one) => one.turn_id === turn.prefix_turn)} from token ${integer(turn.prefix_length)}`) : null),
    turn.parts.map((part) => partOf(turn, part, options)),
    marksOf(turn, read));
}

function marksOf(turn, read) {
  const events = (read.events ?? []).filter((event) => event.turn_id === turn.turn_id);
  return events.map((event) => h("p", { class: "mark" }, eventText(event)));
}

/** What happened at a token, in words. */
export function eventText({ kind, position, from, to }) {
  const place = `at token ${integer(position)}`;
  if (kind === "version") return `Weights v${from} → v${to} ${place}`;
  if (kind === "server") return `Server ${from} → ${to} ${place}`;
  return `Resumed ${place}`;
}

function tokensOf({ count }) {
  return count === 1 ? "1 token" : `${integer(count)} tokens`;
}

function partOf(turn, part, options) {
  const place = h("div", { class: "parttext" }, textBlock(part.text, options));
  const name = NAMES[part.kind] ?? part.kind;
  const tokens = part.count ? h("button", { class: "plain", "aria-label": `${tokensOf(part)} of this ${part.role} part`, onclick: () => options.openTokens(turn, part.start) }, tokensOf(part)) : null;
  const head = h("div", { class: "parthead" }, h("span", { class: "role" }, part.role), name ? h("span", { class: "quiet" }, name) : null, tokens);
  const more = part.more ? moreButton(turn, part, place, options) : null;
  if (!FOLDED.has(part.kind)) return h("section", { class: `part part-${part.role} part-${part.kind}`, "aria-label": `${part.role} ${name}` }, head, place, more);
  const found = options.find && part.text.toLowerCase().includes(options.find.toLowerCase());
  return h("section", { class: `part part-${part.role} part-${part.kind}`, "aria-label": `${part.role} ${name}` }, head,
    h("details", { open: Boolean(found) }, h("summary", { "data-row": true, dir: "auto" }, firstLine(part.text) || "(empty)"), place, more));
}

function moreButton(turn, part, place, options) {
  const state = h("div");
  const button = h("button", { class: "button", onclick: async () => {
    button.hidden = true;
    try {
      const text = await options.readText(turn, part, (done, total) => fill(state, progress(`${integer(done)} of ${integer(total)} tokens`, done, total)));
      fill(place, textBlock(text, options));
      fill(state);
    } catch (error) {
      button.hidden = false;
      if (error.name !== "AbortError") fill(state, failure(error));
    }
  } }, `Read the whole part (${integer(part.count)} tokens)`);
  return h("div", { class: "cut" }, button, state);
}
