// What the model writes, round by round, and its checkpoints to download.

import { askOr } from "./api.js";
import { el, number, roundLink, table } from "./dom.js";
import { bytes } from "./format.js";

const loss = (n) => (n === null ? "–" : n.toFixed(3));

export class Model {
  constructor(root) {
    this.samples = el("div");
    this.checkpoints = el("div");
    root.append(el("h2", {}, "What it writes"), this.samples, el("h2", {}, "Checkpoints"), this.checkpoints,
      el("p", { class: "note" }, "A checkpoint loads with ", el("code", {}, "AutoModelForCausalLM.from_pretrained"), "; ", el("code", {}, "cairn export"),
        " makes a folder without the outer optimizer's momentum. The state digest is the digest of model.safetensors: the chain vouches for it."));
    this.at = 0;
  }

  close() { this.closed = true; }

  status() {
    if (Date.now() - this.at < 15000) return;
    this.at = Date.now();
    this.load();
  }

  async load() {
    const [samples, checkpoints] = await Promise.all([askOr([], "/api/samples"), askOr([], "/api/checkpoints")]);
    if (this.closed) return;
    const rounds = [...new Set(samples.map((s) => s.round))];
    const opened = new Set([...this.samples.querySelectorAll("details[open]")].map((d) => d.dataset.round));
    this.samples.replaceChildren(...(rounds.length ? rounds.map((round, i) => {
      const mine = samples.filter((s) => s.round === round);
      const open = opened.size ? opened.has(String(round)) : i === 0;
      return el("details", { open, "data-round": String(round) },
        el("summary", {}, `Round ${round}`, mine[0].validation_loss === null ? "" : el("small", {}, ` validation loss ${loss(mine[0].validation_loss)}`)),
        ...mine.map((s) => el("blockquote", {}, el("strong", {}, s.prompt), s.text)));
    }) : [el("p", { class: "none" }, "None yet: they are made when a checkpoint is evaluated.")]));
    this.checkpoints.replaceChildren(table("Checkpoints", [["Round"], "State", ["Validation loss"], ["Size"], "Files"], checkpoints.map((c) => {
      const folder = `/checkpoints/round-${String(c.round).padStart(6, "0")}`;
      const files = el("td", { class: "names" });
      c.files.forEach((f, i) => files.append(i ? ", " : "", el("a", { href: `${folder}/${f.name}`, title: bytes(f.bytes) }, f.name)));
      return el("tr", {}, el("td", { class: "n" }, c.round ? roundLink(c.round) : "0"), el("td", { class: c.final ? "digest" : "digest pending", title: c.state }, c.state.slice(0, 8), c.final ? " final" : " not final"),
        number(loss(c.validation_loss)), number(bytes(c.bytes)), files);
    })));
  }
}
