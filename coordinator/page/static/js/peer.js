// One peer, or one account: how it is, what it earned, its receipts, and how to check them.

import { ask, askOr, Missing } from "./api.js";
import { ownCases } from "./audits.js";
import { el, facts, number, peerLink, roundLink, svg, table, teamLink } from "./dom.js";
import { bytes, credits, duration, loss, shortKey, short } from "./format.js";
import { copyable } from "./join.js";
import { totals } from "./leaderboard.js";
import { isAway, phase } from "./peers.js";
import { checkReceipt, possible } from "./proof.js";

const PAGE = 20;

// Receipts with a button each; a coordinator that keeps none has no such section.
class Receipts {
  constructor(key) {
    this.key = key;
    this.box = el("section", { hidden: true });
    this.rows = [];
    this.next = null;
  }

  async load(more = false) {
    const page = await askOr(null, "/api/receipts", { peer: this.key, limit: PAGE, before: more ? this.next : null });
    if (!page) return;
    this.rows = more ? [...this.rows, ...page.receipts] : page.receipts;
    this.next = page.next;
    this.box.hidden = false;
    this.box.replaceChildren(
      el("h3", {}, "Receipts"),
      table("Receipts", [["Round"], "Status", "Why not", ["Tokens"], ["Credits"], "Proof"], this.rows.map((r) => this.row(r)), "none yet: a receipt is made when a round is final"),
      this.next === null ? "" : el("div", { class: "pages" }, el("button", { class: "secondary outline", onclick: () => this.load(true) }, "Older")),
      el("h3", {}, "Check it yourself"),
      el("p", {}, "On your own machine, which trusts nobody: ", el("code", {}, "cairn audit ledger INVITE"), ". It fetches the chain from members, computes every credit again and says where the coordinator differs, to the line."),
      possible() ? "" : el("p", { class: "note" }, "This browser checks proofs on pages by https or from this machine only."),
    );
  }

  row(r) {
    const said = el("span", { role: "status" });
    const check = el("button", { class: "secondary outline small", disabled: !possible(), onclick: async () => {
      said.textContent = " checking";
      try {
        said.textContent = ` holds: ${await checkReceipt(r, this.key)}`;
        said.className = "holds";
      } catch (e) {
        said.textContent = ` does not hold: ${e.message}`;
        said.className = "missed";
      }
    } }, "check");
    const file = el("a", { href: `data:application/octet-stream;base64,${r.bytes}`, download: `receipt-${r.round}-${shortKey(this.key)}.bin` }, "save");
    const status = r.status === "pending" ? `pending until final round number ${r.pending_until}` : `${r.status} ${r.void_reason}`.trim();
    return el("tr", {}, el("td", { class: "n" }, roundLink(r.round)), el("td", { class: r.status === "pending" ? "pending" : r.void_reason ? "why missed" : null }, status), el("td", { class: "why" }, r.reason || "–"),
      number(short(r.tokens)), number(credits(r.micro_credits)), el("td", { class: "why" }, check, " ", file, said));
  }
}

// A column for each of the newest rounds, oldest first: the tokens that were accepted, or a mark where the peer was not in.
function strip(newest) {
  const rounds = [...newest].reverse(), most = Math.max(...rounds.map((r) => r.tokens)), missed = rounds.filter((r) => r.absence);
  const picture = svg("svg", { viewBox: `0 0 ${Math.max(24, rounds.length) * 8} 48`, preserveAspectRatio: "none", class: "strip", role: "img",
    "aria-label": `In ${rounds.length - missed.length} of the newest ${rounds.length} rounds, with up to ${short(most)} tokens` });
  rounds.forEach((r, i) => {
    const high = r.absence ? 5 : Math.max(2, (46 * r.tokens) / (most || 1));
    const bar = svg("rect", { x: 8 * i + 1, y: 48 - high, width: 6, height: high, class: r.absence ? "out" : "in" });
    const title = svg("title");
    title.textContent = `round ${r.round}: ${r.absence ? r.absence.message : `${short(r.tokens)} tokens, ${credits(r.micro_credits)} credits`}`;
    bar.append(title);
    picture.append(bar);
  });
  return picture;
}

// The badge of a peer or an account, with the line of Markdown that embeds it in another page.
function badge(kind, key) {
  const path = `/badge/${kind}/${key}.svg`;
  return el("div", {}, el("h3", {}, "A badge for your own page"), el("p", {}, el("img", { src: path, alt: "The badge", height: "20" })), copyable(`![credits](${location.origin}${path})`));
}

export class Peer {
  constructor(root, key) {
    this.key = key;
    this.body = el("div", {}, el("p", { "aria-busy": "true" }, "asking"));
    this.receipts = new Receipts(key);
    root.append(this.body, this.receipts.box);
    this.at = 0;
    this.head = null;
  }

  close() { this.closed = true; }

  status(s) {
    if (Date.now() - this.at > 2500) this.load(s.time, s.round);
    if (s.head !== this.head && !this.receipts.rows.length) this.receipts.load();
    this.head = s.head;
  }

  async load(now, round) {
    this.at = Date.now();
    let found;
    try {
      found = await ask(`/api/peers/${this.key}`);
    } catch (e) {
      this.body.replaceChildren(el("h2", {}, "Peer ", el("code", {}, shortKey(this.key))), el("p", {}, e instanceof Missing ? `${e.message[0].toUpperCase()}${e.message.slice(1)} (yet): a peer is shown from its first heartbeat on.` : "The coordinator does not answer."));
      return;
    }
    if (this.closed) return;
    this.badge ??= this.receipts.box.parentElement.appendChild(badge("peer", this.key));
    const p = found.peer, away = isAway(p), said = JSON.stringify([found.audits, round >= (p.conviction?.barred_until ?? 0)]);
    if (said !== this.said) [this.said, this.cases] = [said, ownCases(found.audits, round)]; // what somebody has unfolded stays so
    const newest = found.newest[0];
    const sentence = p.conviction?.barred ? `It was convicted in round ${p.conviction.round}, and may be in no record before round ${p.conviction.barred_until}.` : newest === undefined ? "" : newest.absence ? `Not in round ${newest.round}: ${newest.absence.message}.${away ? "" : " Its work is part of a later round."}` : away ? `Its newest round is ${newest.round}.` : `It is in round ${newest.round}.`;
    this.body.replaceChildren(
      el("h2", {}, p.name || `Peer ${shortKey(p.peer)}`),
      el("p", { class: "message" }, phase(p), p.since === null || ["barred", "banned"].includes(p.phase) ? ". " : ` for ${duration(Math.max(0, now - p.since))}. `, sentence),
      ...(this.cases ? [this.cases] : []),
      facts([["Tokens/s", away ? "–" : short(p.tokens_per_second)], ["Loss", loss(p.loss)], ["Rounds in", String(found.rounds)], ["Tokens", short(found.tokens)],
        ["Credits", credits(p.micro_credits_settled)], ["Not final", credits(p.micro_credits_pending)], ["Sent", bytes(p.bytes_up)], ["Received", bytes(p.bytes_down)]]),
      el("dl", { class: "digests" }, el("dt", {}, "Key"), el("dd", {}, el("code", {}, p.peer)), el("dt", {}, "Device"), el("dd", {}, p.device || "–"),
        el("dt", {}, "Link"), el("dd", {}, p.up_per_second === null ? "–" : `${bytes(p.up_per_second)}/s up, ${bytes(p.down_per_second)}/s down; ${p.relayed_peers ? `reaches ${p.relayed_peers} peers through others` : "reaches every peer directly"}`)),
      el("h3", {}, "Newest rounds ", found.newest.length ? el("small", { class: "note" }, "tokens accepted in each; red: it was not in") : ""),
      found.newest.length ? strip(found.newest) : "",
      table("Newest rounds of this peer", [["Round"], "Was it in?", ["Tokens"], ["Credits"], "Record"], found.newest.map((r) => el("tr", {}, el("td", { class: "n" }, roundLink(r.round)),
        el("td", { class: r.absence ? "why missed" : "why" }, r.absence ? `no: ${r.absence.message}` : "yes"), number(r.tokens ? short(r.tokens) : "–"), number(r.micro_credits ? credits(r.micro_credits) : "–"),
        el("td", { class: r.final ? "digest" : "digest pending", title: r.record }, r.record.slice(0, 8), r.final ? " final" : " not final"))), "in none of the newest rounds"),
    );
  }
}

export class Account {
  constructor(root, key) {
    this.key = key;
    this.body = el("div", {}, el("p", { "aria-busy": "true" }, "asking"));
    root.append(this.body);
    this.head = null;
  }

  close() { this.closed = true; }

  async status(s) {
    if (s.head === this.head) return;
    this.head = s.head;
    const a = await askOr(null, `/api/accounts/${this.key}`);
    if (this.closed) return;
    if (a?.kind !== "account") {
      this.body.replaceChildren(el("h2", {}, "Account ", el("code", {}, shortKey(this.key))), el("p", {}, "This coordinator knows no such account."));
      return;
    }
    this.badge ??= this.body.parentElement.appendChild(badge("account", this.key));
    this.body.replaceChildren(
      el("h2", {}, a.name || `Account ${shortKey(this.key)}`, " ", a.team ? el("small", {}, "team ", teamLink(a.team)) : ""),
      totals(a),
      el("dl", { class: "digests" }, el("dt", {}, "Key"), el("dd", {}, el("code", {}, this.key))),
      el("h3", {}, "Its peers"),
      table("Peers of this account", ["Peer"], (a.peers ?? []).map((p) => el("tr", {}, el("td", {}, peerLink({ peer: p })))), "none"),
      el("p", { class: "note" }, "Receipts are each peer's: follow its name."),
    );
  }
}


