// Charts by uPlot. Each is a box with a heading; it is drawn once, then only its data change.

import { el } from "./dom.js";
import { bytes, duration, plural, short } from "./format.js";
import { digits, extent, freaks, logTicks, smoothed } from "./series.js";

const HEIGHT = 230, ALONE = 300;
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const day = (t) => new Date(t * 1000).toLocaleDateString([], { month: "short", day: "numeric" });
const hour = (t, step) => new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hourCycle: "h23" });
const tidy = (text) => text.replace(/\.0(?=\D|$)/, "");

const WHOLE = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000];
const SECONDS = [0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 18000, 36000, 86400, 172800, 432000];

// kinds: how a y value is written.
const KINDS = { number: short, count: short, loss: (v) => v.toFixed(3), perplexity: (v) => (v < 1000 ? String(Number(v.toPrecision(3))) : short(v)), bytes, duration };
const FROM_ZERO = ["bytes", "duration", "count"];

// A clock on each tick; the day where it changes, if there is more than one.
function times(ticks, step) {
  const days = ticks.map((t) => (t === null ? "" : day(t)));
  if (step >= 86400) return days;
  const many = new Set(days).size > 1;
  return ticks.map((t, i) => (t === null ? "" : hour(t, step) + (many && days[i] !== days[i - 1] ? `\n${days[i]}` : "")));
}

export class Chart {
  // series: [{label, color (a CSS variable), dots, smooths}]; by: "time" or what x counts; stacked: bands on each other.
  constructor(title, subtitle, { by = "time", kind = "number", series, stacked = false, empty = "Shown from the second round on." }) {
    this.spec = { by, kind, series, stacked };
    this.look = { log: false, smoothing: 0 };
    this.plotted = el("div", { class: "chart", role: "img", "aria-label": `${title} ${subtitle}` });
    this.without = empty;
    this.empty = el("p", { class: "empty" }, "loading");
    this.plotted.hidden = true;
    this.title = el("span", {}, title);
    this.beyond = el("small", { class: "beyond" });
    const legend = series.length > 1 ? el("ul", { class: "legend" }, ...series.map((s) => el("li", { "data-color": s.color.slice(2) }, s.label))) : null;
    this.box = el("section", { class: "chart-box" }, el("h2", {}, this.title, " ", el("small", {}, subtitle)), legend, this.plotted, this.empty, this.beyond);
    this.plot = null;
    this.columns = null;
    this.zoom = null;
    this.bounds = [-Infinity, Infinity];
    this.marks = [];
  }

  // kind, title, log and smoothing, as the reader wants them.
  set({ kind = this.spec.kind, title = this.title.textContent, ...look }) {
    this.spec.kind = kind;
    this.title.textContent = title;
    this.look = { ...this.look, ...look };
    this.redraw();
  }

  // marks: [{x, kind, to}], drawn as lines; with `to` the time up to there is shaded.
  show(columns, marks = []) {
    this.columns = columns;
    this.marks = marks;
    const data = this.prepare(), there = data.slice(1).some((c) => c.some((v) => v !== null && v !== undefined));
    this.plotted.hidden = !there;
    this.empty.hidden = there;
    this.empty.textContent = this.without;
    if (!there) return;
    if (this.plot && this.plot.series.length === data.length) this.plot.setData(data, false);
    else {
      this.plot?.destroy();
      this.plot = new uPlot(this.options(), data, this.plotted);
    }
    this.rescale();
    const last = columns.slice(1).map((c, i) => `${this.spec.series[i].label} ${this.write(c.findLast((v) => v !== null && v !== undefined) ?? null)}`);
    const beyond = this.beyond.textContent ? `; ${this.beyond.textContent.slice(2)}` : "";
    this.plotted.setAttribute("aria-label", `${this.title.textContent} ${this.box.querySelector("small").textContent}: newest ${last.join(", ")}${beyond}`);
  }

  // The columns that are drawn: those given, stacked or with their means; and which of their values are beyond the scale.
  prepare() {
    const { series, stacked, kind } = this.spec;
    const [xs, ...ys] = stacked ? stack(this.columns) : this.columns;
    const falls = kind === "loss" || kind === "perplexity";
    if (stacked) {
      const top = new Set(freaks(ys.at(-1)));
      this.far = ys.map(() => top);
    } else this.far = ys.map((column, i) => new Set(series[i].dots ? [] : freaks(column, falls)));
    this.scaled = ys;
    this.bounds = [-Infinity, Infinity];
    const [low, high] = xs.length ? this.range() : [0, 0], values = ys.flatMap((column, i) => (stacked && i < ys.length - 1 ? [] : [...this.far[i]].map((k) => column[k]).filter((v) => v < low || v > high)));
    const most = values.reduce((a, b) => Math.max(a, b), -Infinity);
    this.beyond.textContent = values.length ? `${most > high ? "▲" : "▼"} ${plural(values.length, "value")} beyond the scale: ${values.length > 1 ? "up to " : ""}${this.write(most)}` : "";
    const means = this.smooths.map((i) => this.mean(ys[i], this.far[i]));
    return [xs, ...ys, ...means].map((column, i) => (this.look.log && i ? column.map((v) => (v > 0 ? v : v === undefined ? v : null)) : column));
  }

  // On a logarithmic scale the geometric mean: the other one is pulled up by its largest values.
  mean(column, without) {
    const { smoothing, log } = this.look;
    if (!log) return smoothed(column, smoothing, without);
    return smoothed(column.map((v) => (v > 0 ? Math.log(v) : v)), smoothing, without).map((v) => (v === null || v === undefined ? v : Math.exp(v)));
  }

  get smooths() {
    return this.look.smoothing ? this.spec.series.map((s, i) => (s.smooths ? i : -1)).filter((i) => i >= 0) : [];
  }

  write(v) {
    return v === null || v === undefined ? "–" : KINDS[this.spec.kind](v);
  }

  // All of x, or what was chosen by dragging over it.
  rescale() {
    const xs = this.columns[0], first = xs[0], last = Math.max(xs.at(-1), ...this.marks.map((m) => m.to ?? m.x));
    const alone = this.spec.by === "time" ? [first - ALONE, first + ALONE] : [Math.max(0, first - (first || 1)), first + (first || 1)];
    const [min, max] = this.bounds = this.zoom ?? (first === last ? alone : [first, last]);
    this.plot.setScale("x", { min, max });
  }

  options() {
    const { by, series, stacked, kind } = this.spec, { log } = this.look;
    const time = by === "time", smooths = new Set(this.smooths);
    const axis = { stroke: color("--quiet-text"), grid: { stroke: color("--pico-muted-border-color"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const alone = () => this.columns[0].length === 1;
    const xs = (_, ticks, axisIndex, space, step) => (time ? times(ticks, step) : ticks.map((t) => (alone() && t !== this.columns[0][0] ? "" : tidy(short(t)))));
    const ys = (_, ticks, axisIndex, space, step) => ticks.map((v) => (v === null ? "" : kind === "loss" ? (log ? String(v) : v.toFixed(digits(step))) : kind === "duration" && step < 60 && v >= 90 ? tidy(`${(v / 60).toFixed(1)} min`) : tidy(this.write(v))));
    const value = (i) => (_, __, ___, index) => this.write(index === null || index === undefined ? null : this.columns[i + 1][index]);
    const drawn = series.map((s, i) => ({
      label: s.label,
      stroke: color(smooths.has(i) ? s.color + "-soft" : s.color),
      width: smooths.has(i) ? 1.5 : 2,
      fill: stacked ? color(s.color + "-soft") : undefined,
      paths: s.dots ? () => null : undefined,
      points: { show: s.dots ? true : () => this.columns[0].length < 3, size: s.dots ? 7 : 5, fill: color(s.color) },
      value: value(i),
    }));
    const means = [...smooths].map((i, k) => ({
      label: `${series[i].label}, smoothed`, stroke: color(series[i].color), width: 2, points: { show: false },
      value: (plot, _, __, index) => this.write(index === null || index === undefined ? null : plot.data[series.length + 1 + k][index]),
    }));
    const increments = kind === "count" ? WHOLE : kind === "duration" ? SECONDS : undefined;
    return {
      width: this.plotted.clientWidth || 320,
      height: HEIGHT,
      padding: [18, 12, 0, 0],
      scales: { x: { time }, y: { distr: log ? 3 : 1, range: () => this.range() } },
      axes: [{ ...axis, values: xs, space: 70, size: 40, gap: 4 }, { ...axis, values: ys, size: 58, incrs: increments, ...(log ? { splits: (_, __, low, high) => logTicks(low, high), filter: (_, splits) => splits } : {}) }],
      series: [{ label: time ? "Time" : by, value: (_, v) => (v === null || v === undefined ? "–" : time ? new Date(v * 1000).toLocaleString() : short(v)) }, ...drawn, ...means],
      bands: stacked ? series.slice(1).map((_, i) => ({ series: [i + 2, i + 1] })) : undefined,
      cursor: { y: false, drag: { setScale: false }, bind: { dblclick: () => () => this.turnTo(null) } },
      hooks: { setSelect: [(u) => this.selected(u)], drawClear: [(u) => this.shade(u)], draw: [(u) => this.mark(u)] },
    };
  }

  // y of what is to be seen, without the values beyond the scale.
  range() {
    const [min, max] = this.bounds, xs = this.columns[0];
    const from = Math.max(0, xs.findIndex((x) => x >= min)), to = xs.findLastIndex((x) => x <= max);
    const positive = this.look.log ? this.scaled.map((c) => c.map((v) => (v > 0 ? v : null))) : this.scaled;
    const found = extent(positive, this.far, from, to) ?? extent(positive, this.far) ?? extent(positive, this.far.map(() => new Set()));
    if (found === null) return this.look.log ? [0.1, 1] : [0, 1];
    const [low, high] = found;
    if (this.look.log) {
      const pad = Math.max(1.02, (high / low) ** 0.06);
      return [low / pad, high * pad];
    }
    const pad = (high - low || Math.abs(high) || 1) * 0.08;
    return this.spec.stacked || FROM_ZERO.includes(this.spec.kind) ? [0, high ? high + 0.08 * high : 1] : [low - pad, high + pad];
  }

  selected(u) {
    const { left, width } = u.select;
    if (width < 8) return;
    u.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.turnTo([u.posToVal(left, "x"), u.posToVal(left + width, "x")]);
  }

  turnTo(zoom) {
    this.zoom = zoom;
    this.rescale();
  }

  shade(u) {
    const { ctx, bbox } = u, { min, max } = u.scales.x;
    ctx.save();
    for (const m of this.marks) {
      if (m.to === undefined || m.to < min || m.x > max) continue;
      const left = u.valToPos(Math.max(m.x, min), "x", true), right = u.valToPos(Math.min(m.to, max), "x", true);
      ctx.fillStyle = color("--shade");
      ctx.fillRect(left, bbox.top, right - left, bbox.height);
    }
    ctx.restore();
  }

  // Lines where the owner paused, resumed, rolled back or ended the run, and arrows where a value is beyond the scale.
  mark(u) {
    const { ctx, bbox } = u, { min, max } = u.scales.x, ratio = uPlot.pxRatio;
    let free = -Infinity;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textBaseline = "top";
    ctx.textAlign = "left";
    ctx.lineWidth = ratio;
    for (const m of this.marks) {
      if (m.x < min || m.x > max) continue;
      const x = Math.round(u.valToPos(m.x, "x", true)), wide = ctx.measureText(m.kind).width;
      const isLeft = x + wide + 8 * ratio > bbox.left + bbox.width, start = isLeft ? x - wide - 4 * ratio : x + 4 * ratio;
      ctx.strokeStyle = ctx.fillStyle = color("--mark");
      ctx.setLineDash([4 * ratio, 3 * ratio]);
      ctx.beginPath();
      ctx.moveTo(x, bbox.top - 12 * ratio);
      ctx.lineTo(x, bbox.top + bbox.height);
      ctx.stroke();
      if (start < free) continue;
      ctx.fillText(m.kind, start, bbox.top - 13 * ratio);
      free = start + wide + 6 * ratio;
    }
    ctx.setLineDash([]);
    ctx.fillStyle = color("--quiet-text");
    const { min: low, max: high } = u.scales.y, half = 4 * ratio;
    this.scaled.forEach((column, c) => this.far[c].forEach((i) => {
      const v = column[i], x = u.valToPos(this.columns[0][i], "x", true);
      if ((v <= high && v >= low) || this.columns[0][i] < min || this.columns[0][i] > max) return;
      const tip = v > high ? bbox.top : bbox.top + bbox.height, way = v > high ? 1 : -1;
      ctx.beginPath();
      ctx.moveTo(x, tip);
      ctx.lineTo(x - half, tip + way * 1.6 * half);
      ctx.lineTo(x + half, tip + way * 1.6 * half);
      ctx.fill();
    }));
    ctx.restore();
  }

  resize() {
    if (this.plot && this.plotted.clientWidth) this.plot.setSize({ width: this.plotted.clientWidth, height: HEIGHT });
  }

  redraw() {
    if (this.plot) this.plot.destroy();
    this.plot = null;
    if (this.columns) this.show(this.columns, this.marks);
  }
}

// Each column on those before it. Where one is missing there is a gap: half a sum would look like a short round.
function stack([x, ...columns]) {
  const below = x.map(() => 0), gap = x.map((_, i) => columns.some((c) => c[i] === null));
  return [x, ...columns.map((c) => c.map((v, i) => (gap[i] ? null : (below[i] += v))))];
}
