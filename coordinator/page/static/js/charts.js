// Charts by uPlot. Each is a box with a heading; it is drawn once, then only its data change.

import { el } from "./dom.js";
import { bytes, duration, short } from "./format.js";

const HEIGHT = 220;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const clock = (t, step) => (step >= 86400 ? new Date(t * 1000).toLocaleDateString([], { month: "short", day: "numeric" })
  : new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hour12: false }));
const tidy = (text) => text.replace(/\.0(?=\D|$)/, "");

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];

// kinds: how a y value is written.
const KINDS = { number: short, count: short, loss: (v) => v.toFixed(3), bytes, duration };

export class Chart {
  // series: [{label, color (a CSS variable), dots, fill}]; by: "time" or what x counts; stacked: bands on each other.
  constructor(title, subtitle, { by = "time", kind = "number", series, stacked = false, empty = "Shown from the second round on." }) {
    this.spec = { by, kind, series, stacked };
    this.plotted = el("div", { class: "chart", role: "img", "aria-label": `${title} ${subtitle}` });
    this.empty = el("p", { class: "empty" }, empty);
    const legend = series.length > 1 ? el("ul", { class: "legend" }, ...series.map((s) => el("li", { "data-color": s.color.slice(2) }, s.label))) : null;
    this.box = el("section", { class: "chart-box" }, el("h2", {}, title, " ", el("small", {}, subtitle)), legend, this.plotted, this.empty);
    this.plot = null;
    this.columns = null;
  }

  show(columns) {
    this.columns = columns;
    const there = columns[0].length > 0 && columns.slice(1).some((c) => c.some((v) => v !== null));
    this.plotted.hidden = !there;
    this.empty.hidden = there;
    if (!there) return;
    const { stacked } = this.spec;
    const data = stacked ? stack(columns) : columns;
    if (this.plot) this.plot.setData(data);
    else this.plot = new uPlot(this.options(columns[0].length), data, this.plotted);
    const last = columns.slice(1).map((c, i) => `${this.spec.series[i].label} ${this.write(c.findLast((v) => v !== null) ?? null)}`);
    this.plotted.setAttribute("aria-label", `${this.box.querySelector("h2").textContent}: newest ${last.join(", ")}`);
  }

  write(v) {
    return v === null || v === undefined ? "–" : KINDS[this.spec.kind](v);
  }

  options(count) {
    const { by, series, stacked } = this.spec;
    const time = by === "time";
    const axis = { stroke: color("--quiet-text"), grid: { stroke: color("--pico-muted-border-color"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const xs = (_, ticks, axisIndex, space, step) => ticks.map((t) => (time ? clock(t, step) : tidy(short(t))));
    const digits = (step) => Math.min(6, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    const ys = (_, ticks, axisIndex, space, step) => ticks.map((v) => (v === null ? "" : this.spec.kind === "loss" ? v.toFixed(digits(step)) : tidy(this.write(v))));
    const drawn = series.map((s, i) => ({
      label: s.label,
      stroke: color(s.color),
      width: 2,
      fill: stacked ? color(s.color + "-soft") : undefined,
      spanGaps: true,
      paths: s.dots ? () => null : undefined,
      points: { show: s.dots || count < 3, size: s.dots ? 7 : 5, fill: color(s.color) },
      value: (_, __, ___, index) => this.write(index === null || index === undefined ? null : this.columns[i + 1][index]),
    }));
    return {
      width: this.plotted.clientWidth || 320,
      height: HEIGHT,
      padding: [8, 12, 0, 0],
      scales: { x: { time }, y: { range: (_, low, high) => range(low, high, stacked || ["bytes", "duration", "count"].includes(this.spec.kind)) } },
      axes: [{ ...axis, values: xs, space: 70, size: 30 }, { ...axis, values: ys, size: 58, incrs: this.spec.kind === "count" ? WHOLE : undefined }],
      series: [{ label: time ? "Time" : by, value: (_, v) => (v === null ? "–" : time ? new Date(v * 1000).toLocaleString() : short(v)) }, ...drawn],
      bands: stacked ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : undefined,
      cursor: { y: false },
    };
  }

  resize() {
    if (this.plot && this.plotted.clientWidth) this.plot.setSize({ width: this.plotted.clientWidth, height: HEIGHT });
  }

  redraw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (this.columns) this.show(this.columns);
  }
}

// Each column on those before it. Where one is missing there is a gap: half a sum would look like a short round.
function stack([x, ...columns]) {
  const below = x.map(() => 0), gap = x.map((_, i) => columns.some((c) => c[i] === null));
  return [x, ...columns.map((c) => c.map((v, i) => (gap[i] ? null : (below[i] += v))))];
}

function range(low, high, fromZero) {
  if (low === null || high === null) return [0, 1];
  const pad = (high - low || Math.abs(high) || 1) * 0.08;
  return fromZero ? [0, high ? high + 0.08 * high : 1] : [low - pad, high + pad];
}
