// Lanes of spans over time as SVG: drag to zoom, point at a span for what it was.

import { svg } from "./dom.js";
import { clock, duration, number } from "./format.js";

const [WIDTH, HEIGHT] = [1000, 24];
const TICKS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 43200, 86400];
const MOST_TICKS = 6;

/** Spans that touch a range, cut to it; neighbours that are too short to be seen become one. */
export function spansWithin(spans, [from, to]) {
  const now = Date.now() / 1000;
  const least = (to - from) / WIDTH;
  const found = [];
  for (const span of spans) {
    const cut = { ...span, end: span.end ?? now, from: Math.max(from, span.start), to: Math.min(to, span.end ?? now) };
    if (cut.to <= cut.from) continue;
    const before = found.at(-1);
    if (before && before.activity === cut.activity && cut.from - before.to < least && cut.to - cut.from < least) before.to = cut.to;
    else found.push(cut);
  }
  return found;
}

/** The lane of a node; `tell(text)` gets what the pointer is on, `zoom([from, to])` what was dragged. */
export function laneOf(node, range, label, tell, zoom) {
  const at = (time) => (WIDTH * (time - range[0])) / (range[1] - range[0]);
  const spans = spansWithin(node.spans, range).map((span) =>
    svg("rect", { class: `span act-${span.activity}`, x: at(span.from), y: 3, width: Math.max(0.7, at(span.to) - at(span.from)), height: 14, onpointerenter: () => tell(spanText(node, span)), onclick: () => tell(spanText(node, span)) }));
  const arrivals = (node.arrivals ?? []).filter(({ time }) => time >= range[0] && time <= range[1]).map((one) =>
    svg("rect", { class: "span act-arrival", x: at(one.time) - 1, y: 0, width: 2.5, height: 20, onpointerenter: () => tell(`${one.server ?? node.id} has weights v${one.version} at ${clock(one.time)}`) }));
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "lanepicture", role: "img", "aria-label": label }, spans, arrivals);
  bindDrag(picture, range, zoom);
  return picture;
}

function spanText(node, span) {
  const numbers = Object.entries(span.numbers ?? {}).map(([name, value]) => `${name.replaceAll("_", " ")} ${number(value)}`).join(", ");
  return [`${node.id}: ${span.activity}`, `${clock(span.start)}, ${duration(span.end - span.start)}`, span.reason, numbers].filter(Boolean).join(" · ");
}

function bindDrag(picture, [from, to], zoom) {
  let pressed = null;
  const timeAt = (event) => {
    const box = picture.getBoundingClientRect();
    return from + ((to - from) * (event.clientX - box.left)) / box.width;
  };
  picture.addEventListener("pointerdown", (event) => (pressed = { x: event.clientX, time: timeAt(event) }));
  picture.addEventListener("pointerup", (event) => {
    if (pressed === null || Math.abs(event.clientX - pressed.x) < 6) return;
    zoom([pressed.time, timeAt(event)].sort((one, other) => one - other));
  });
  picture.addEventListener("dblclick", () => zoom(null));
}

/** The times above the lanes, as HTML cannot stretch. */
export function axisOf([from, to]) {
  const step = TICKS.find((one) => (to - from) / one <= MOST_TICKS) ?? (to - from) / MOST_TICKS;
  const ticks = [];
  for (let time = Math.ceil(from / step) * step; time <= to; time += step) ticks.push(time);
  const share = (time) => `${(100 * (time - from)) / (to - from)}%`;
  const texts = ticks.map((time) => svg("text", { x: share(time), y: 14, class: "tick", "text-anchor": "middle" }, clock(time).split(" ").at(-1)));
  return svg("svg", { class: "axis", width: "100%", height: 20, "aria-hidden": "true" }, texts);
}
