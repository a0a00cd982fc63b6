// The tokens of a turn, a window at a time, coloured by what each of them has.

import { getOnce } from "../lib/api.js";
import { fill, h } from "../lib/dom.js";
import { fixed, integer } from "../lib/format.js";
import { empty, facts, field, loading, select } from "../lib/parts.js";
import { COLOURS, difference } from "../lib/token_colours.js";
import { eventText } from "./conversation.js";
import { tokenMap } from "./token_map.js";

const SIZES = [256, 1024, 4096];

/** Tokens of the turn that the link names (the last otherwise); colour, place and size are in the link. */
export async function showTokens(view, read, place) {
  const { turns } = read;
  if (!turns.length) return void fill(place, empty("No token was recorded."));
  const turn = turns.find((one) => one.turn_id === view.query.turn) ?? turns.at(-1);
  const size = SIZES.includes(Number(view.query.size)) ? Number(view.query.size) : 1024;
  const start = Math.min(Math.max(0, Number(view.query.from ?? 0)), Math.max(0, turn.num_tokens - 1));
  const state = { view, read, place, turn, size, start };
  const path = ["runs", view.run, "rollouts", view.id, "tokens"];
  const body = place.querySelector(".tokenbody") ?? place;
  state.window = await loading(body, "Reading tokens", () => getOnce(path, { turn: turn.turn_id, start, count: size }, { signal: view.signal }));
  if (!view.signal.aborted) draw(state);
}

function draw(state) {
  const { place, window } = state;
  const ways = Object.keys(COLOURS).filter((name) => COLOURS[name].has(window));
  const way = COLOURS[ways.includes(state.view.query.color) ? state.view.query.color : ways.includes("logprob") ? "logprob" : ways[0]];
  const inspector = h("div", { class: "inspector", "aria-live": "polite" });
  const focused = document.activeElement?.dataset?.keep;
  fill(place, controls(state, ways, way), tokenMap(state, (from) => move(state, { from })), h("div", { class: "tokenbody" }, legend(way, window), flow(state, way, inspector)), inspector);
  if (focused) place.querySelector(`[data-keep="${focused}"]`)?.focus();
  inspect(state, inspector, 0);
}

function move(state, changes) {
  const { view, read, place } = state;
  view.setQuery(changes);
  showTokens(view, read, place).catch((error) => error.name === "AbortError" || undefined);
}

function controls(state, ways, way) {
  const { read, turn, size, start, window } = state;
  const color = ways.find((name) => COLOURS[name] === way);
  const end = start + window.texts.length;
  const turns = read.turns.map((one, index) => [one.turn_id, `${index + 1} (${integer(one.num_tokens)} tokens)`]);
  const step = (text, name, from, possible) => h("button", { class: "button", "aria-label": name, "data-keep": name, disabled: !possible, onclick: () => move(state, { from }) }, text);
  return h("div", { class: "bar" },
    turns.length > 1 ? field("Turn", select(turns, turn.turn_id, (chosen) => move(state, { turn: chosen, from: "" }))) : null,
    field("Colour by", select(ways.map((name) => [name, COLOURS[name].title]), color, (chosen) => move(state, { color: chosen }), { "data-keep": "color" })),
    field("Window", select(SIZES.map((one) => [String(one), integer(one)]), String(size), (chosen) => move(state, { size: chosen }), { "data-keep": "size" })),
    h("div", { class: "pager" }, step("‹", "Tokens before", Math.max(0, start - size), start > 0),
      h("span", { class: "num" }, `${integer(start)}–${integer(end)} of ${integer(window.total)}`), step("›", "Next tokens", end, end < window.total)));
}

function legend(way, window) {
  return h("p", { class: "legend", "aria-label": "Legend" }, way.legend(window).map(([style, text]) => h("span", {}, h("span", { class: `swatch t-${style}`, "aria-hidden": "true" }), text)));
}

function flow(state, way, inspector) {
  const { window } = state;
  const classOf = way.classOf(window);
  const tokens = window.texts.map((text, index) => h("span", { class: `t t-${classOf(index)}`, "data-token": index }, shownText(text)));
  const marked = withTicks(state, tokens);
  const block = h("div", { class: "tokens", tabindex: "0", role: "group", "aria-label": "Tokens; arrow keys move between them", dir: "ltr", "data-keep": "tokens" }, marked);
  const choose = (index) => inspect(state, inspector, index, tokens);
  block.addEventListener("pointerover", (event) => event.target.dataset.token && choose(Number(event.target.dataset.token)));
  block.addEventListener("click", (event) => event.target.dataset.token && choose(Number(event.target.dataset.token)));
  block.addEventListener("keydown", (event) => {
    const by = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!by) return;
    event.preventDefault();
    choose(Math.min(tokens.length - 1, Math.max(0, (state.at ?? 0) + by)));
    tokens[state.at].scrollIntoView({ block: "nearest" });
  });
  state.tokens = tokens;
  return block;
}

function shownText(text) {
  return text.replaceAll("\n", "⏎\n") || "∅";
}

/** A tick before each token where the weights or the server changed, or a turn was resumed. */
function withTicks(state, tokens) {
  const ticks = new Map();
  for (const event of state.read.events ?? []) {
    if (event.turn_id === undefined || event.turn_id === state.turn.turn_id) ticks.set(event.position - state.start, event);
  }
  return tokens.flatMap((token, index) => (ticks.has(index) ? [tick(ticks.get(index)), token] : [token]));
}

function tick(event) {
  const text = event.kind === "version" ? `v${event.to}` : event.kind === "server" ? "⇄" : "↻";
  return h("span", { class: `tick tick-${event.kind}`, title: eventText(event), role: "img", "aria-label": eventText(event) }, text);
}

function trainedText(trained) {
  return trained === null || trained === undefined ? "not recorded" : trained ? "yes" : "no";
}

function inspect(state, place, index, tokens = state.tokens) {
  const { window, start } = state;
  tokens[state.at]?.classList.remove("chosen");
  state.at = index;
  tokens[index]?.classList.add("chosen");
  if (window.texts[index] === undefined) return void fill(place);
  const gap = difference(window, index);
  const value = (name, decimals) => (window[name] ? fixed(window[name][index], decimals) : null);
  fill(place, facts([["Token", integer(start + index)], ["Text", h("code", { dir: "auto" }, shownText(window.texts[index]))], ["Id", String(window.ids[index])], ["Wrote it", window.origin[index] === "p" ? "policy" : "environment"],
    ["Trained", trainedText(window.trained?.[index])], ["Log-prob", value("logprob", 4)], ["Trainer's", value("train_logprob", 4)], ["Train − rollout", fixed(gap, 4)], ["Ratio", gap === null ? null : fixed(Math.exp(gap), 4)],
    ["Advantage", value("advantage", 3)], ["Version", window.version?.[index] === null || window.version?.[index] === undefined ? null : `v${window.version[index]}`], ["Server", window.server?.[index]]]));
}
