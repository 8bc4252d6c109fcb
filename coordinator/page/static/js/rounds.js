// Rounds: who was in, who was not and why, how long each part took. A table, and one round by itself.

import { ask, askOr, Missing } from "./api.js";
import { el, facts, number, peerLink, roundLink, svg, table } from "./dom.js";
import { bytes, credits, duration, loss, moment, short } from "./format.js";

const PAGE = 25;

// Train, exchange, commit as one bar, with the seconds for those who cannot see it.
export function split(observed) {
  if (!observed || observed.whole === null) return el("span", { class: "none", title: "not observed" }, "–", el("span", { class: "hidden-text" }, "not observed"));
  const parts = [["train", observed.train], ["exchange", observed.exchange], ["commit", observed.commit]].filter(([, t]) => t !== null);
  const text = parts.map(([name, t]) => `${name} ${duration(t)}`).join(", ");
  const bar = svg("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", class: "split", "aria-hidden": "true" });
  let at = 0;
  for (const [name, t] of parts) {
    const wide = observed.whole ? (100 * t) / observed.whole : 0;
    bar.append(svg("rect", { x: at, y: 0, width: wide, height: 6, class: name }));
    at += wide;
  }
  return el("span", { class: "took", title: text || null }, duration(observed.whole), bar, el("span", { class: "hidden-text" }, text));
}

// Those who were not in, with the reason; the same reason is said once.
export function missed(absent, inAll, most = 3) {
  if (absent === null) return el("span", { class: "none" }, "not observed");
  if (!inAll) return "–";
  const byMessage = new Map();
  for (const a of absent) byMessage.set(a.message, [...(byMessage.get(a.message) || []), a]);
  const cell = el("span", { class: "missed" });
  let shown = 0;
  for (const [message, those] of [...byMessage].slice(0, most)) {
    const named = those.slice(0, most);
    if (shown) cell.append("; ");
    named.forEach((a, i) => cell.append(i ? ", " : "", peerLink(a)));
    const others = those.length - named.length;
    cell.append(`${others ? ` and ${others} more` : ""}: ${message}`);
    shown += those.length;
  }
  if (inAll > shown) cell.append(`; and ${inAll - shown} more`);
  return cell;
}

function roundRow(r) {
  const more = r.contributors_total - r.contributors.length;
  const names = el("td", { class: "names" });
  r.contributors.forEach((c, i) => names.append(i ? ", " : "", peerLink(c)));
  if (more > 0) names.append(` and ${more} more`);
  return el("tr", {},
    el("td", { class: "n" }, roundLink(r.round)), number(loss(r.loss)), number(short(r.tokens)), number(split(r.observed)),
    number(String(r.contributors_total)), names, el("td", { class: "names" }, missed(r.absent, r.absent_total)),
    el("td", { title: r.record, class: r.final ? "digest" : "digest pending" }, r.record.slice(0, 8), r.final ? " final" : " not final"));
}

export function roundTable(rounds) {
  const made = table("Rounds", [["Round"], ["Loss"], ["Tokens"], ["Took"], ["In"], "Who", "Not in, and why", "Record"], rounds.map(roundRow));
  made.classList.add("rounds");
  return made;
}

export class Rounds {
  constructor(root) {
    this.before = [];
    this.next = null;
    this.body = el("div");
    this.newer = el("button", { class: "secondary outline", onclick: () => { this.before.pop(); this.load(); } }, "Newer");
    this.older = el("button", { class: "secondary outline", onclick: () => { this.before.push(this.next); this.load(); } }, "Older");
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Rounds"), el("ul", { class: "legend" }, ...[["good", "train"], ["accent", "exchange"], ["warn", "commit"]].map(([c, name]) => el("li", { "data-color": c }, name)))),
      this.body, el("div", { class: "pages" }, this.newer, this.older),
      el("p", { class: "note" }, "Times, absent peers and reasons are observations of this coordinator. Everything else is from the chain."),
    );
    this.head = null;
  }

  close() { this.closed = true; }

  status(s) {
    const due = s.head !== this.head && (!this.before.length || this.head === null);
    this.head = s.head;
    if (due) this.load();
  }

  async load() {
    const found = await askOr(null, "/api/rounds/newest", { before: this.before.at(-1), limit: PAGE });
    if (!found || this.closed) return;
    this.next = found.next;
    this.body.replaceChildren(roundTable(found.rounds));
    this.newer.disabled = !this.before.length;
    this.older.disabled = found.next === null;
    this.newer.parentElement.hidden = found.next === null && !this.before.length;
  }
}

export class Round {
  constructor(root, number_) {
    this.number = number_;
    this.body = el("div", {}, el("p", { "aria-busy": "true" }, "asking"));
    root.append(this.body);
    this.final = false;
    this.head = null;
  }

  close() { this.closed = true; }

  status(s) {
    if (s.head === this.head || this.final) return;
    this.head = s.head;
    this.load();
  }

  async load() {
    let r;
    try {
      r = await ask(`/api/rounds/${this.number}`);
    } catch (e) {
      this.body.replaceChildren(el("p", {}, e instanceof Missing ? `Round ${this.number}: ${e.message}.` : "The coordinator does not answer."));
      if (!(e instanceof Missing)) this.head = null;
      return;
    }
    if (this.closed) return;
    this.final = r.final;
    const observed = r.observed;
    const times = observed ? [["Train", duration(observed.train)], ["Exchange", duration(observed.exchange)], ["Commit", duration(observed.commit)], ["Sent", bytes(observed.sent)]] : [];
    const named = [["Record", r.record], ["Record before", r.parent], ["State it began from", r.base_state]];
    this.body.replaceChildren(
      el("h2", {}, `Round ${r.round} `, el("small", {}, observed ? `certified ${moment(observed.certified)}` : "not observed", r.final ? ", final" : ", not final yet")),
      facts([["In", String(r.contributors_total)], ["Not in", r.absent === null ? "–" : String(r.absent_total)], ["Loss", loss(r.loss)], ["Tokens", short(r.tokens)], ["Credits", credits(r.micro_credits)], ...times]),
      el("h3", {}, "In"),
      table(`In round ${r.round}`, ["Peer", ["Windows"], ["Tokens"], ["Credits"], ["Announced"]], r.contributors.map((c) => el("tr", {},
        el("td", { class: "name" }, peerLink(c)), number(String(c.windows)), number(short(c.tokens)), number(credits(c.micro_credits)),
        number(c.announced_seconds === null ? "–" : `+${duration(c.announced_seconds)}`)))),
      el("h3", {}, "Not in, and why"),
      r.absent === null ? el("p", { class: "none" }, "Nobody looked: the coordinator was away, or it is long ago.")
        : table(`Not in round ${r.round}`, ["Peer", "Why"], r.absent.map((a) => el("tr", {}, el("td", { class: "name" }, peerLink(a)), el("td", { class: "why" }, a.message))), "everybody was in"),
      el("h3", {}, "Check it yourself"),
      el("dl", { class: "digests" }, ...named.flatMap(([name, d]) => [el("dt", {}, name), el("dd", {}, el("code", {}, d))])),
      el("p", {}, el("a", { href: `/api/rounds/${r.round}/certificate` }, "The certificate"), ": the signed record and the votes for it. The credits follow from it."),
      el("p", { class: "pages" }, r.round > 0 ? el("a", { href: `#round/${r.round - 1}` }, "Round before") : "", " ", el("a", { href: `#round/${r.round + 1}` }, "Round after")),
    );
  }
}
