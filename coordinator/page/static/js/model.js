// What is trained on what, and how; what the model writes, round by round; its checkpoints to download.

import { askOr } from "./api.js";
import { el, number, roundLink, table } from "./dom.js";
import { bytes, duration, loss, moment, perplexity, short } from "./format.js";

const whole = (n) => (n === null ? "–" : n.toLocaleString("en"));
const list = (rows) => el("dl", { class: "digests" }, ...rows.filter((r) => r[1] !== null).flatMap(([name, ...what]) => [el("dt", {}, name), el("dd", {}, ...what)]));

function rate(inner) {
  const { kind, warmup_tokens: warmup, decay_fraction: fall, min_ratio: least } = inner.schedule;
  const course = { constant: "constant", cosine: `a cosine down to ${least} of it`, wsd: `constant, then a fall to ${least} of it over the last ${Math.round(100 * fall)}%` }[kind] ?? kind;
  return `${inner.lr}, ${course}${warmup ? `, after a rise over ${short(warmup)} tokens` : ""}`;
}

// The run spec in words. Everything here was signed by the run's owner before the first round.
function card(run, tokens) {
  const { model: m, data: d, settings: { inner, codec, outer, round, audit } } = run;
  const step = inner.batch * d.window_tokens;
  const epochs = (n) => { const passes = n / (d.windows * d.window_tokens); return passes === 0 ? "0" : passes < 10 ? passes.toPrecision(2) : short(Math.round(passes)); };
  const sparse = codec.kind === "sparse" ? `, ${codec.k} of 4096 coordinates` : "";
  return el("div", { class: "card" },
    el("section", {}, el("h3", {}, "Model"), list([
      ["Type", m.type], ["Parameters", whole(m.parameters)],
      ["Adapter", m.adapter && `LoRA of rank ${m.adapter.rank}, alpha ${m.adapter.alpha}, on a frozen base of ${short(m.adapter.base)} parameters in ${m.adapter.dtype}`], ["Layers", m.layers && String(m.layers)],
      ["Width", m.width && `${m.width}${m.heads ? `, ${m.heads} heads` : ""}`],
      ["Vocabulary", m.vocabulary && `${whole(m.vocabulary)} tokens`], ["Context", m.context && `${whole(m.context)} tokens`],
    ])),
    el("section", {}, el("h3", {}, "Data"), list([
      ["To train on", `${short(d.tokens)} tokens in ${short(d.windows)} windows of ${d.window}`],
      ["Passes over it", `${epochs(tokens)} so far${run.total_tokens ? `, ${epochs(Math.max(tokens, run.total_tokens))} in the end` : ""}`],
      ["Held out", d.validation_tokens ? `${short(d.validation_tokens)} tokens` : "nothing"],
      ["From", d.addresses.length ? d.addresses.join(", ") : "the swarm itself"],
    ])),
    el("section", {}, el("h3", {}, "Training"), list([
      ["Goal", run.total_tokens ? `${short(run.total_tokens)} tokens` : "none: until its owner ends it"],
      ["Optimizer", `${{ muon: "Muon on hidden matrices, AdamW on the rest", adamw: "AdamW" }[inner.optimizer] ?? inner.optimizer}; weight decay ${inner.weight_decay}, gradients clipped to ${inner.clip_norm}`],
      ["Learning rate", rate(inner)], ["Inner step", `${inner.batch} windows, ${short(step)} tokens`],
      ["Round", `${short(round.target_tokens)} tokens of all peers together, which is ${whole(Math.ceil(round.target_tokens / step))} inner steps; at most ${duration(round.max_seconds)}`],
      ["Update", `${codec.kind}${sparse}${codec.beta ? `, error feedback ${codec.beta}` : ""}; exchange: ${round.exchange}`],
      ["Outer step", `${outer.optimizer}, rate ${outer.lr}${outer.optimizer === "nesterov" ? `, momentum ${outer.momentum}` : ""}; clip: ${outer.clip}, no peer above ${Math.round(100 * outer.weight_cap)}%`],
      ["Audits", audit.replayable ? "any peer can train an update again and compare" : "updates are not replayable"],
    ])),
    el("section", {}, el("h3", {}, "Run"), list([
      ["About", run.about.description || null], ["License", run.about.license || null], ["Contact", run.about.contact || null],
      ["Owner's key", el("code", {}, run.owner)], ["Run id", el("code", {}, run.run)],
      ["First round", run.began === null ? null : `ended ${moment(run.began)}`],
      ["Who takes part", { open: "anybody", invite: "by invite", allow: "the keys on its owner's list" }[run.join.admission]],
    ])));
}

// How a checkpoint becomes a model. Without its base an adapter's file loads as a model of random weights.
const use = (adapter) => adapter
  ? ["A checkpoint holds the adapter alone: ", el("code", {}, "cairn export"), " makes a folder that ", el("code", {}, "peft"), " loads, and with ", el("code", {}, "--merge"), " a whole model."]
  : ["A checkpoint loads with ", el("code", {}, "AutoModelForCausalLM.from_pretrained"), "; ", el("code", {}, "cairn export"), " makes a folder without the outer optimizer's momentum."];

export class Model {
  constructor(root) {
    this.card = el("div");
    this.samples = el("div");
    this.checkpoints = el("div");
    this.use = el("p", { class: "note" });
    root.append(el("h2", {}, "What is trained"), this.card,
      el("p", { class: "note" }, "From the run spec, which the owner signed and nobody can change, except about, license and contact. A directive can change rounds."),
      el("h2", {}, "What it writes"), this.samples, el("h2", {}, "Checkpoints"), this.checkpoints, this.use);
    this.at = 0;
  }

  close() { this.closed = true; }

  status(s) {
    if (Date.now() - this.at < 15000) return;
    this.at = Date.now();
    this.load(s.tokens);
  }

  async load(tokens) {
    const [run, samples, checkpoints] = await Promise.all([askOr(null, "/api/run"), askOr([], "/api/samples"), askOr([], "/api/checkpoints")]);
    if (this.closed) return;
    if (run) {
      this.card.replaceChildren(card(run, tokens));
      this.use.replaceChildren(...use(run.model.adapter), " The state digest is the digest of model.safetensors: the chain vouches for it.");
    }
    const rounds = [...new Set(samples.map((s) => s.round))];
    const opened = new Set([...this.samples.querySelectorAll("details[open]")].map((d) => d.dataset.round));
    this.samples.replaceChildren(...(rounds.length ? rounds.map((round, i) => {
      const mine = samples.filter((s) => s.round === round);
      const open = opened.size ? opened.has(String(round)) : i === 0;
      return el("details", { open, "data-round": String(round) },
        el("summary", {}, `Round ${round}`, mine[0].validation_loss === null ? "" : el("small", {}, ` validation loss ${loss(mine[0].validation_loss)}, perplexity ${perplexity(mine[0].validation_loss)}`)),
        ...mine.map((s) => el("blockquote", {}, el("strong", {}, s.prompt), s.text.replace(/\n{4,}/g, (run) => `\n[${run.length - 1} empty lines]\n`))));
    }) : [el("p", { class: "none" }, "None yet: they are made when a checkpoint is evaluated.")]));
    this.checkpoints.replaceChildren(table("Checkpoints", [["Round"], "State", ["Validation loss"], ["Perplexity"], ["Size"], "Files"], checkpoints.map((c) => {
      const folder = `/checkpoints/round-${String(c.round).padStart(6, "0")}`;
      const files = el("td", { class: "names" });
      c.files.forEach((f, i) => files.append(i ? ", " : "", el("a", { href: `${folder}/${f.name}`, title: bytes(f.bytes) }, f.name)));
      return el("tr", {}, el("td", { class: "n" }, c.round ? roundLink(c.round) : "0"), el("td", { class: c.final ? "digest" : "digest pending", title: c.state }, c.state.slice(0, 8), c.final ? " final" : " not final"),
        number(loss(c.validation_loss)), number(perplexity(c.validation_loss)), number(bytes(c.bytes)), files);
    })));
  }
}
