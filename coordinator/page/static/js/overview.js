// The first view: the numbers, the charts, the newest rounds.

import { askOr } from "./api.js";
import { Chart } from "./charts.js";
import { el, facts } from "./dom.js";
import { credits, loss, short } from "./format.js";
import { roundTable } from "./rounds.js";

export class Overview {
  constructor(root) {
    this.facts = el("div");
    this.rounds = el("div");
    const tokens = { by: "Tokens", kind: "loss", empty: "No round is accepted yet.", series: [
      { label: "training", color: "--good" }, { label: "validation", color: "--accent", dots: true }] };
    this.charts = {
      loss: new Chart("Loss", "by tokens", tokens),
      lossTime: new Chart("Loss", "by time", { ...tokens, by: "time" }),
      rate: new Chart("Tokens per second", "accepted", { series: [{ label: "tokens/s", color: "--good" }] }),
      peers: new Chart("Peers", "training", { kind: "count", series: [{ label: "peers", color: "--good" }] }),
      rounds: new Chart("Round", "duration", { kind: "duration", stacked: true, series: [
        { label: "train", color: "--good" }, { label: "exchange", color: "--accent" }, { label: "commit", color: "--warn" }] }),
      bytes: new Chart("Bytes", "of all peers, a round", { kind: "bytes", series: [
        { label: "sent", color: "--good" }, { label: "received", color: "--accent" }] }),
    };
    root.append(
      this.facts,
      el("div", { class: "charts" }, ...Object.values(this.charts).map((c) => c.box)),
      el("section", {}, el("h2", {}, "Newest rounds"), this.rounds, el("p", { class: "note" }, el("a", { href: "#rounds" }, "All rounds"))),
    );
    this.head = null;
    this.resized = () => { for (const c of Object.values(this.charts)) c.resize(); };
    this.recolored = () => { for (const c of Object.values(this.charts)) c.redraw(); };
    addEventListener("resize", this.resized);
    this.scheme = matchMedia("(prefers-color-scheme: dark)");
    this.scheme.addEventListener("change", this.recolored);
  }

  close() {
    this.closed = true;
    removeEventListener("resize", this.resized);
    this.scheme.removeEventListener("change", this.recolored);
  }

  status(s) {
    const training = s.peers_total > s.training ? `${s.training} of ${s.peers_total}` : String(s.training);
    this.facts.replaceChildren(facts([
      ["Training", training], ["Round", String(s.round)], ["Loss", loss(s.loss)], ["Tokens/s", short(s.tokens_per_second)],
      ["Tokens", short(s.tokens)], ["Credits", credits(s.micro_credits_settled + s.micro_credits_pending)],
      ["Final up to", s.final_round === null ? "–" : `round ${s.final_round}`],
    ]));
    if (s.head !== this.head) {
      this.head = s.head;
      this.draw();
    }
  }

  async draw() {
    const [c, newest] = await Promise.all([askOr(null, "/api/charts"), askOr(null, "/api/rounds/newest", { limit: 8 })]);
    if (this.closed) return;
    if (newest) this.rounds.replaceChildren(roundTable(newest.rounds));
    if (!c || !newest) this.head = null; // asked again with the next event
    if (!c) return;
    const known = (p) => p.tokens !== null;
    this.charts.loss.show(merge(c.tokens, c.loss, c.validation.filter(known).map((v) => [v.tokens, v.loss])));
    const observed = c.seen_at.map((t, i) => [t, c.loss[i]]).filter(([t]) => t !== null);
    this.charts.lossTime.show(merge(observed.map(([t]) => t), observed.map(([, y]) => y), c.validation.filter((v) => v.seen_at !== null).map((v) => [v.seen_at, v.loss])));
    this.charts.rate.show([c.times, c.rates]);
    const r = c.by_round;
    this.charts.peers.show([r.times, r.peers]);
    this.charts.rounds.show([r.times, r.train, r.exchange, r.commit]);
    this.charts.bytes.show([r.times, r.sent, r.received]);
  }
}

// One x axis for a line and for dots that lie elsewhere.
function merge(xs, ys, dots) {
  const at = new Map(xs.map((x, i) => [x, [ys[i], null]]));
  for (const [x, y] of dots) at.set(x, [at.get(x)?.[0] ?? null, y]);
  const all = [...at.keys()].sort((a, b) => a - b);
  return [all, all.map((x) => at.get(x)[0]), all.map((x) => at.get(x)[1])];
}
