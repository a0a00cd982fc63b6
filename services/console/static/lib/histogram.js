// Histograms as SVG: bars of one or two lists of values; a bar may be a link.

import { h, svg } from "./dom.js";
import { integer, number } from "./format.js";

const [WIDTH, HEIGHT, WIDEST] = [320, 100, 80];

/** Bins `{ low, high, counts }` of equal width over all lists. */
export function bins(lists, most = 24) {
  const all = lists.flat().filter((value) => value !== null && value !== undefined);
  if (!all.length) return [];
  const [low, high] = all.reduce(([least, largest], value) => [Math.min(least, value), Math.max(largest, value)], [all[0], all[0]]);
  const count = low === high ? 1 : Math.max(2, Math.min(most, Math.ceil(2 * Math.cbrt(all.length))));
  const width = (high - low) / count || 1;
  const found = Array.from({ length: count }, (_, index) => ({ low: low + index * width, high: low + (index + 1) * width, counts: lists.map(() => 0) }));
  lists.forEach((values, list) => {
    for (const value of values) {
      if (value !== null && value !== undefined) found[Math.min(count - 1, Math.floor((value - low) / width))].counts[list] += 1;
    }
  });
  return found;
}

/** A histogram of `lists` of `{ name, values }`; `linkOf(bin)` makes bars links. */
export function histogram(title, lists, { linkOf = null, unit = "" } = {}) {
  const shown = bins(lists.map((one) => one.values));
  if (!shown.length) return null;
  const largest = Math.max(...shown.flatMap((bin) => bin.counts));
  const bars = shown.map((bin, index) => barOf(bin, index, { shown, largest, lists, linkOf, unit }));
  const label = `${title}: from ${number(shown[0].low)} to ${number(shown.at(-1).high)}${unit}, ${lists.map((one) => `${one.values.length} ${one.name}`).join(", ")}`;
  const picture = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", class: "histogram", role: linkOf ? "group" : "img", "aria-label": label }, bars);
  const legend = lists.length > 1 ? h("span", { class: "legend" }, lists.map((one, index) => h("span", { class: `key key-${index}` }, one.name))) : null;
  return h("figure", { class: "figure" }, h("figcaption", {}, title, legend), picture, ends(shown, unit));
}

function barOf(bin, index, { shown, largest, lists, linkOf, unit }) {
  const slot = Math.min(WIDTH / shown.length, WIDEST);
  const text = `${number(bin.low)} to ${number(bin.high)}${unit}: ${bin.counts.map((count, list) => `${integer(count)} ${lists[list].name}`).join(", ")}`;
  const rects = bin.counts.map((count, list) => {
    const height = count ? Math.max(1.5, ((HEIGHT - 4) * count) / largest) : 0;
    return svg("rect", { class: `bar bar-${list}`, x: index * slot + 1, y: HEIGHT - height, width: Math.max(1, slot - 2), height });
  });
  const title = svg("title", {}, text);
  if (!linkOf || !bin.counts.some(Boolean)) return svg("g", {}, title, rects);
  return svg("a", { href: linkOf(bin), "aria-label": text }, title, svg("rect", { class: "hit", x: index * slot, y: 0, width: slot, height: HEIGHT }), rects);
}

function ends(shown, unit) {
  return h("p", { class: "ends num", "aria-hidden": "true" }, h("span", {}, number(shown[0].low) + unit), shown.length > 1 ? h("span", {}, number(shown.at(-1).high) + unit) : null);
}
