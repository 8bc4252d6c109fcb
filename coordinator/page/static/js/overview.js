// The first view: the numbers, the charts, the newest rounds.

import { askOr } from "./api.js";
import { Chart } from "./charts.js";
import { el, facts } from "./dom.js";
import { credits, loss, moment, perplexity, short } from "./format.js";
import { roundTable } from "./rounds.js";
import { breaks, merge, withGaps } from "./series.js";

const KEPT = "cairn.charts";
const LOOK = { perplexity: false, log: false, smoothing: 0 };

function kept() {
  try {
    const said = JSON.parse(localStorage.getItem(KEPT)) ?? {};
    return { perplexity: said.perplexity === true, log: said.log === true, smoothing: Math.min(0.95, Math.max(0, Number(said.smoothing) || 0)) };
  } catch { // no storage, or not what was put there
    return { ...LOOK };
  }
}

export class Overview {
  constructor(root) {
    this.facts = el("div");
    this.rounds = el("div");
    this.marks = el("ul", { class: "marks", "aria-label": "What the run's owner did", hidden: true });
    this.look = kept();
    const tokens = { by: "Tokens", kind: "loss", empty: "No round is accepted yet.", series: [
      { label: "training", color: "--good", smooths: true }, { label: "validation", color: "--accent", dots: true }] };
    this.charts = {
      loss: new Chart("Loss", "by tokens", tokens),
      lossTime: new Chart("Loss", "by time", { ...tokens, by: "time" }),
      rate: new Chart("Tokens per second", "accepted", { series: [{ label: "tokens/s", color: "--good", smooths: true }] }),
      peers: new Chart("Peers", "training", { kind: "count", series: [{ label: "peers", color: "--good" }] }),
      rounds: new Chart("Round", "duration", { kind: "duration", stacked: true, series: [
        { label: "train", color: "--good" }, { label: "exchange", color: "--accent" }, { label: "commit", color: "--warn" }] }),
      bytes: new Chart("Bytes", "of all peers, a round", { kind: "bytes", series: [
        { label: "sent", color: "--good" }, { label: "received", color: "--accent" }] }),
    };
    root.append(
      this.facts, this.controls(),
      el("div", { class: "charts" }, ...Object.values(this.charts).map((c) => c.box)),
      this.marks,
      el("section", {}, el("h2", {}, "Newest rounds"), this.rounds, el("p", { class: "note" }, el("a", { href: "#rounds" }, "All rounds"))),
    );
    this.turn(this.look);
    this.told = null;
    this.resized = () => { for (const c of Object.values(this.charts)) c.resize(); };
    this.recolored = () => { for (const c of Object.values(this.charts)) c.redraw(); };
    addEventListener("resize", this.resized);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.recolored);
  }

  controls() {
    const of = (perplexity, text) => el("button", { class: "secondary outline", "aria-pressed": String(this.look.perplexity === perplexity), onclick: () => this.turn({ perplexity }) }, text);
    this.kinds = [of(false, "loss"), of(true, "perplexity")];
    const log = el("input", { type: "checkbox", role: "switch", checked: this.look.log, onchange: (e) => this.turn({ log: e.target.checked }) });
    const smoothing = el("input", { type: "range", min: "0", max: "0.95", step: "0.05", value: String(this.look.smoothing), oninput: (e) => this.turn({ smoothing: Number(e.target.value) }) });
    return el("div", { class: "controls", role: "group", "aria-label": "Charts" },
      el("div", { class: "choice", role: "group", "aria-label": "Loss as" }, ...this.kinds),
      el("label", {}, log, "log scale"), el("label", {}, "smoothing", smoothing),
      el("small", { class: "zoom" }, "drag over a chart to zoom, double-click to return"));
  }

  // Show the charts in another way; a browser remembers it.
  turn(change) {
    this.look = { ...this.look, ...change };
    const { perplexity, log, smoothing } = this.look;
    try {
      localStorage.setItem(KEPT, JSON.stringify(this.look));
    } catch { /* no storage: it holds until the page is left */ }
    this.kinds.forEach((b, i) => b.setAttribute("aria-pressed", String(perplexity === Boolean(i))));
    const title = perplexity ? "Perplexity" : "Loss", kind = perplexity ? "perplexity" : "loss";
    for (const c of [this.charts.loss, this.charts.lossTime]) c.set({ kind, title, log, smoothing });
    this.charts.rate.set({ log, smoothing });
    this.charts.bytes.set({ log });
    if (this.shown) this.show();
  }

  close() {
    this.closed = true;
    removeEventListener("resize", this.resized);
    this.scheme.removeEventListener("change", this.recolored);
  }

  status(s) {
    this.now = s.time;
    const training = s.peers_total > s.training ? `${s.training} of ${s.peers_total}` : String(s.training);
    const rate = s.tokens_per_second ? short(s.tokens_per_second) : "–";
    this.facts.replaceChildren(facts([
      ["Training", training], ["Round", String(s.round)], ["Tokens/s", rate], ["Loss", loss(s.loss)],
      ...(s.validation_loss === null ? [] : [["Validation loss", loss(s.validation_loss)], ["Perplexity", perplexity(s.validation_loss)]]),
      ["Tokens", short(s.tokens)], ["Credits", credits(s.micro_credits_settled + s.micro_credits_pending)],
      ["Final up to", s.final_round === null ? "–" : String(s.final_round)],
    ]));
    const told = `${s.head} ${s.health}`; // a pause or an end is marked at once
    if (told !== this.told) {
      this.told = told;
      this.draw();
    }
  }

  async draw() {
    const [c, newest] = await Promise.all([askOr(null, "/api/charts"), askOr(null, "/api/rounds/newest", { limit: 8 })]);
    if (this.closed) return;
    if (newest) this.rounds.replaceChildren(roundTable(newest.rounds));
    if (!c || !newest) this.told = null; // asked again with the next event
    if (!c) return;
    this.shown = c;
    this.show();
  }

  show() {
    const c = this.shown, y = this.look.perplexity ? Math.exp : (v) => v;
    const losses = c.loss.map((v) => (v === null ? null : y(v)));
    const pauses = c.marks.filter((m) => m.kind === "paused").map((m) => m.time);
    const onTime = (xs, ...columns) => withGaps([xs, ...columns], breaks(xs, pauses));
    const byTime = c.marks.map((m, i) => ({ x: m.time, kind: m.kind, to: m.kind === "paused" ? c.marks[i + 1]?.time ?? this.now : undefined }));
    const seen = c.seen_at.map((t, i) => [t, losses[i], c.tokens[i]]).filter(([t]) => t !== null);
    // By tokens, a directive is where the newest round before it ended.
    const byTokens = c.marks.filter((m) => m.kind !== "resumed").map((m) => ({ x: seen.findLast(([t]) => t <= m.time)?.[2], kind: m.kind })).filter((m) => m.x !== undefined);
    this.charts.loss.show(merge([c.tokens, losses], c.validation.filter((v) => v.tokens !== null).map((v) => [v.tokens, y(v.loss)])), byTokens);
    this.charts.lossTime.show(merge(onTime(seen.map(([t]) => t), seen.map(([, v]) => v)), c.validation.filter((v) => v.seen_at !== null).map((v) => [v.seen_at, y(v.loss)])), byTime);
    // A rate over a gap says nothing: how long of it was trained is not known.
    const after = new Set(breaks(c.times, pauses));
    this.charts.rate.show(onTime(c.times, c.rates.map((v, i) => (after.has(i) ? null : v))), byTime);
    const r = c.by_round;
    this.charts.peers.show(onTime(r.times, r.peers), byTime);
    this.charts.rounds.show(onTime(r.times, r.train, r.exchange, r.commit), byTime);
    this.charts.bytes.show(onTime(r.times, r.sent, r.received), byTime);
    this.marks.hidden = !c.marks.length;
    this.marks.replaceChildren(...c.marks.map((m) => el("li", {}, el("strong", {}, m.kind), ` ${moment(m.time)}`, m.text ? `: ${m.text}` : "")));
  }
}
