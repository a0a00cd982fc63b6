// Curves over steps, drawn by uPlot: drag to zoom, double click for the whole, click a point to open its step.

import { h } from "./dom.js";
import { clock, integer, number } from "./format.js";

const { uPlot } = globalThis;
const WHOLE = [1, 2, 5].flatMap((first) => Array.from({ length: 13 }, (_, power) => first * 10 ** power)).sort((one, other) => one - other);

/** Values smoothed by an exponential moving average; `weight` 0 leaves them, gaps stay gaps. */
export function smooth(values, weight) {
  if (!weight) return values;
  let [mean, mass] = [0, 0];
  return values.map((value) => {
    if (value === null || value === undefined) return value;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

/** One chart in `place`; drawn again when its place or the colours change. */
export class LineChart {
  constructor(place, { title, signal, height = 190, sync = null, time = false, onPoint = null, onZoom = null }) {
    Object.assign(this, { place, title, height, sync, time, onPoint, onZoom, stops: [] });
    this.resizing = new ResizeObserver(() => this.plot?.setSize({ width: this.width(), height }));
    this.resizing.observe(place);
    window.addEventListener("themechange", () => this.again(), { signal });
    signal.addEventListener("abort", () => this.close());
  }

  /** `series`: `{ name, values, raw, x }`; `evaluations`: `{ step, mean, low, high, best }`; `range`: `[min, max]` of x. */
  draw(x, series, evaluations = [], range = null) {
    this.given = [x, series, evaluations, range];
    this.zoomed = range;
    this.plot?.destroy();
    this.evaluations = evaluations;
    const data = uPlot.join([
      ...series.map((one) => [one.x ?? x, one.values, ...(one.raw ? [one.raw] : [])]),
      ...(evaluations.length ? [[evaluations.map((one) => one.x ?? one.step), evaluations.map((one) => one.mean)]] : []),
    ]);
    this.plot = new uPlot(this.options(series, evaluations), data, this.place);
    if (range) this.plot.setScale("x", { min: range[0], max: range[1] });
    this.tellNewest();
    this.describe(x, series);
    this.bindClicks();
  }

  /** Without a pointer the legend has the newest value of each line. */
  tellNewest() {
    const plot = this.plot;
    if (plot && plot.cursor.idx === null) plot.setLegend({ idxs: plot.data.map((values) => values.findLastIndex(isKnown)) }, false);
  }

  /** What is drawn, as comma-separated values with a heading. */
  csv() {
    const { data, series } = this.plot;
    const rows = [series.map((one) => one.label), ...data[0].map((_, index) => data.map((values) => values[index] ?? ""))];
    return rows.map((row) => row.map(csvCell).join(",")).join("\r\n");
  }

  /** The picture as it is shown, with its title. */
  picture() {
    const { canvas } = this.plot.ctx;
    const copy = Object.assign(document.createElement("canvas"), { width: canvas.width, height: canvas.height + 28 * devicePixelRatio });
    const ctx = copy.getContext("2d");
    ctx.fillStyle = colour("--surface");
    ctx.fillRect(0, 0, copy.width, copy.height);
    ctx.fillStyle = colour("--text");
    ctx.font = `${13 * devicePixelRatio}px system-ui, sans-serif`;
    ctx.fillText(this.title, 10 * devicePixelRatio, 18 * devicePixelRatio);
    ctx.drawImage(canvas, 0, copy.height - canvas.height);
    return new Promise((resolve) => copy.toBlob(resolve));
  }

  /** The same again, for other colours or another range. */
  again(range = this.zoomed) {
    if (!this.given) return;
    const [x, series, evaluations] = this.given;
    this.draw(x, series, evaluations, range);
  }

  close() {
    this.resizing.disconnect();
    this.plot?.destroy();
    this.plot = null;
  }

  width() {
    return Math.max(200, this.place.clientWidth);
  }

  options(series, evaluations) {
    return {
      width: this.width(),
      height: this.height,
      cursor: { sync: this.sync ? { key: this.sync, filters: { pub: isMove, sub: isMove } } : undefined, drag: { x: true, y: false }, points: { size: 7 } },
      scales: { x: { time: this.time }, y: { range: (_, low, high) => rangeOf(low, high, evaluations) } },
      axes: [{ ...this.axis(false, !this.time), size: this.time ? 42 : 28 }, { ...this.axis(true, series.every((one) => one.values.every(isWhole))), size: 54 }],
      padding: [10, 12, 0, 0],
      series: [{ label: this.time ? "Time" : "Step", value: (_, x) => this.placeOf(x) }, ...[...series.flatMap(lines), ...(evaluations.length ? [heldout()] : [])].map((one) => ({ ...one, value: (...given) => this.valueText(...given) }))],
      hooks: { drawClear: [(plot) => this.drawStops(plot)], draw: [(plot) => this.drawRanges(plot)], setSelect: [(plot) => this.selected(plot)], setLegend: [() => this.tellNewest()] },
    };
  }

  placeOf(x) {
    return this.time ? clock(x) : integer(x);
  }

  /** A value of the legend; with its step where that is not the one the legend is of. */
  valueText(plot, value, _, index) {
    const elsewhere = isKnown(value) && index !== plot.legend.idx;
    return `${number(value, 4)}${elsewhere ? ` (${this.time ? "" : "step "}${this.placeOf(plot.data[0][index])})` : ""}`;
  }

  /** `whole`: its ticks are whole numbers. */
  axis(vertical, whole) {
    const grid = { stroke: colour("--line"), width: 1 };
    const values = vertical || !this.time ? { values: (_, ticks) => ticks.map((tick) => (tick === null ? "" : number(tick, 4))) } : {};
    return { stroke: colour("--quiet"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif", ...(whole ? { incrs: WHOLE } : {}), ...values };
  }

  /** Over time, bands where the run was stopped. */
  drawStops(plot) {
    const { ctx, bbox } = plot;
    ctx.save();
    ctx.fillStyle = colour("--raised");
    const at = (time) => Math.min(bbox.left + bbox.width, Math.max(bbox.left, plot.valToPos(time, "x", true)));
    for (const [from, to] of this.time ? this.stops : []) ctx.fillRect(at(from), bbox.top, at(to) - at(from), bbox.height);
    ctx.restore();
  }

  /** A line from low to high at each evaluation, and a ring around the best. */
  drawRanges(plot) {
    const { ctx } = plot;
    ctx.save();
    ctx.strokeStyle = colour("--series-2");
    ctx.lineWidth = 1.5 * devicePixelRatio;
    const best = this.evaluations.findLast((one) => one.best);
    for (const one of this.evaluations) this.drawRange(plot, ctx, one, one === best);
    ctx.restore();
  }

  drawRange(plot, ctx, one, isBest) {
    const at = (value) => plot.valToPos(value, "y", true);
    const x = plot.valToPos(one.x ?? one.step, "x", true);
    if (x < plot.bbox.left || x > plot.bbox.left + plot.bbox.width) return;
    ctx.beginPath();
    if (one.low !== null && one.low !== undefined) {
      ctx.moveTo(x, at(one.low));
      ctx.lineTo(x, at(one.high));
    }
    if (isBest) {
      ctx.moveTo(x + 7 * devicePixelRatio, at(one.mean));
      ctx.arc(x, at(one.mean), 7 * devicePixelRatio, 0, 2 * Math.PI);
    }
    ctx.stroke();
  }

  /** A range that a person dragged, or the whole (null). */
  zoom(range) {
    this.zoomed = range;
    this.onZoom?.(range);
  }

  selected(plot) {
    const { left, width } = plot.select;
    if (width > 0) this.zoom([plot.posToVal(left, "x"), plot.posToVal(left + width, "x")]);
  }

  describe(x, series) {
    const words = series.map((one) => {
      const values = one.values.filter(isKnown);
      if (!values.length) return `${one.name}: no value`;
      return `${one.name}: last ${number(values.at(-1))}, lowest ${number(Math.min(...values))}, highest ${number(Math.max(...values))}`;
    });
    const { canvas } = this.plot.ctx;
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${this.title}, ${x.length} points. ${words.join("; ")}`);
  }

  bindClicks() {
    const { over } = this.plot;
    let pressed = 0;
    over.addEventListener("dblclick", () => this.zoom(null));
    over.addEventListener("mousedown", (event) => (pressed = event.clientX));
    over.addEventListener("click", (event) => {
      const { idx } = this.plot.cursor;
      if (!this.onPoint || idx === null || Math.abs(event.clientX - pressed) > 3) return;
      this.onPoint(this.plot.data[0][idx]);
    });
  }
}

/** What the vertical axis shows: all values, and the ranges of evaluations whole. */
function rangeOf(low, high, evaluations) {
  const known = evaluations.filter((one) => one.low !== null && one.low !== undefined);
  const [least, largest] = [Math.min(low ?? 0, ...known.map((one) => one.low)), Math.max(high ?? 1, ...known.map((one) => one.high))];
  return uPlot.rangeNum(least, largest, 0.1, true);
}

function isMove(type) {
  return type === "mousemove" || type === "mouseleave";
}

function lines(one, index) {
  const stroke = colour(`--series-${[1, 3, 4, 5][index % 4]}`);
  const line = { label: one.name, stroke, width: 1.8, spanGaps: true, points: { show: one.values.length < 3 } };
  if (!one.raw) return [line];
  return [line, { label: `${one.name}, each step`, stroke: colour("--faint"), width: 1, spanGaps: true, points: { show: false } }];
}

function heldout() {
  const stroke = colour("--series-2");
  return { label: "held-out", stroke, width: 0, paths: () => null, points: { show: true, size: 6, fill: stroke } };
}

function isKnown(value) {
  return value !== null && value !== undefined;
}

function isWhole(value) {
  return !isKnown(value) || Number.isInteger(value);
}

/** A cell as RFC 4180 has it. */
function csvCell(value) {
  const text = String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function save(name, blob) {
  const address = URL.createObjectURL(blob);
  h("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}

/** A chart with its heading, and buttons that save its values and its picture. */
export function chartFigure(title, name, options) {
  const place = h("div", { class: "chart" });
  const chart = new LineChart(place, { title, ...options });
  const button = (kind, blob) => h("button", { class: "plain", "aria-label": `Save ${title} as ${kind}`, onclick: async () => save(`${name}.${kind.toLowerCase()}`, await blob()) }, kind);
  const saving = h("span", { class: "saving" }, button("CSV", () => new Blob([chart.csv()], { type: "text/csv" })), button("PNG", () => chart.picture()));
  return { chart, figure: h("figure", { class: "figure" }, h("figcaption", {}, title, saving), place) };
}
