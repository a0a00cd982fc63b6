// The whole turn on one line: which part is shown, and where the weights or the server changed.

import { h, svg } from "../lib/dom.js";
import { integer } from "../lib/format.js";
import { eventText } from "./conversation.js";

const [WIDTH, HEIGHT] = [1000, 22];

/** A line to choose the window from; the range below it does the same by keyboard. */
export function tokenMap({ turn, read, start, window }, onMove) {
  const { total } = window;
  if (total <= window.texts.length) return null;
  const at = (position) => (WIDTH * position) / total;
  const events = (read.events ?? []).filter((event) => event.turn_id === undefined || event.turn_id === turn.turn_id);
  const parts = turn.parts.map((part) => svg("rect", { class: `map-${part.role}`, x: at(part.start), y: 5, width: Math.max(0.5, at(part.count)), height: 8 }));
  const marks = events.map((event) => svg("line", { class: `map-${event.kind}`, x1: at(event.position), x2: at(event.position), y1: 1, y2: 17 }, svg("title", {}, eventText(event))));
  const shown = svg("rect", { class: "map-window", x: at(start), y: 1, width: Math.max(3, at(window.texts.length)), height: 16 });
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "tokenmap", "aria-hidden": "true", onclick: (event) => {
    const box = picture.getBoundingClientRect();
    onMove(Math.max(0, Math.round((total * (event.clientX - box.left)) / box.width - window.texts.length / 2)));
  } }, parts, marks, shown);
  const range = h("input", { type: "range", min: 0, max: total - 1, step: 64, value: start, "aria-label": `First token shown, of ${integer(total)}`, "data-keep": "map", onchange: (event) => onMove(Number(event.target.value)) });
  return h("div", { class: "map" }, picture, range);
}
