// The table of peers: sorted, filtered and paged by the server, so that a thousand peers are as quick as ten.

import { askOr } from "./api.js";
import { el, number, peerLink, table } from "./dom.js";
import { bytes, credits, duration, loss, moment, short } from "./format.js";

const PAGE = 25, EVERY = 3000;
const COLUMNS = [
  // key to sort by, heading, is a number, first order
  ["name", "Name", false, "up"], ["state", "State", false, "up"], ["since", "Since", true, "down"], ["speed", "Tokens/s", true, "down"],
  ["loss", "Loss", true, "up"], ["up", "Sent", true, "down"], ["down", "Received", true, "down"], ["last_round", "Last round", true, "down"],
  [null, "Not in the newest", false], ["credits", "Credits", true, "down"], ["device", "Device", false, "up"],
];

export const phase = (p) => el("span", { class: "phase", "data-phase": p.phase, title: p.phase === "resting" ? "paused by its user" : null }, p.phase);

export const convicted = (c) => `convicted in round ${c.round}, barred until ${c.barred_until}: ${c.message || "its work was not what it claims"}`;

export const isAway = (p) => ["silent", "gone", "banned", "barred"].includes(p.phase);

export function earned(p) {
  const cell = number(credits(p.micro_credits_settled));
  if (p.micro_credits_pending) cell.append(" ", el("span", { class: "pending", title: "not final yet" }, `+${credits(p.micro_credits_pending)}`));
  return cell;
}

function traffic(total, perSecond) {
  return number(bytes(total), perSecond ? { title: `${bytes(perSecond)}/s at this moment` } : {});
}

function peerRow(p, now) {
  const away = isAway(p);
  const why = p.absence ? p.absence.message : p.last_round === null ? "in no round lately" : "";
  const guilt = p.conviction;
  return el("tr", { class: away ? "away" : null },
    el("td", { class: "name" }, peerLink(p)), el("td", {}, phase(p), guilt && !guilt.barred ? el("span", { class: "note", title: guilt.message }, ` convicted in round ${guilt.round}${guilt.pardoned === null ? "" : ", pardoned"}`) : null),
    number(p.since === null ? "–" : duration(Math.max(0, now - p.since)), { title: p.since === null ? null : moment(p.since) }),
    number(away ? "–" : short(p.tokens_per_second === null ? null : Math.round(p.tokens_per_second))), number(loss(p.loss)),
    traffic(p.bytes_up, p.up_per_second), traffic(p.bytes_down, p.down_per_second),
    el("td", { class: "n" }, p.last_round === null ? "–" : el("a", { href: `#round/${p.last_round}` }, String(p.last_round))),
    guilt?.barred ? el("td", { class: "why guilty" }, convicted(guilt)) : el("td", { class: p.absence ? "why missed" : "why" }, away && !p.absence ? "" : why),
    earned(p),
    el("td", { class: "device", title: p.device || null }, p.device || "–"));
}

export class Peers {
  constructor(root) {
    this.asked = { sort: "state", order: "up", q: "", offset: 0, limit: PAGE };
    this.filter = el("input", { type: "search", placeholder: "name, device, key or state", "aria-label": "Filter peers", maxlength: "64", oninput: () => this.filtered() });
    this.count = el("small", { role: "status" });
    this.body = el("div");
    this.before = el("button", { class: "secondary outline", onclick: () => this.turn(-PAGE) }, "Previous");
    this.after = el("button", { class: "secondary outline", onclick: () => this.turn(PAGE) }, "Next");
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Peers ", this.count), this.filter),
      this.body, el("div", { class: "pages" }, this.before, this.after),
      el("p", { class: "note" }, "State, loss, speed and traffic are what each peer says of itself. Credits come from the chain; those in ",
        el("span", { class: "pending" }, "italics"), " are not final yet. A peer that is not in a round loses nothing: its work goes into a later one. Only peers that are here or were lately are listed."),
    );
    this.now = 0;
    this.at = 0;
    this.closed = false;
  }

  close() {
    this.closed = true;
    clearTimeout(this.typing);
  }

  status(s) {
    this.now = s.time;
    if (Date.now() - this.at < EVERY) return;
    this.load();
    this.at = Date.now();
  }

  filtered() {
    clearTimeout(this.typing);
    this.typing = setTimeout(() => {
      this.asked.q = this.filter.value.trim();
      this.asked.offset = 0;
      this.load();
    }, 150);
  }

  turn(by) {
    this.asked.offset = Math.max(0, this.asked.offset + by);
    this.load();
  }

  sort(by, first) {
    const same = this.asked.sort === by;
    this.asked = { ...this.asked, sort: by, order: same ? (this.asked.order === "up" ? "down" : "up") : first, offset: 0 };
    this.load();
  }

  async load() {
    const asked = { ...this.asked };
    const found = await askOr(null, "/api/peers", asked);
    if (found && !this.closed && JSON.stringify(asked) === JSON.stringify(this.asked)) this.show(found);
  }

  heading([by, text, isNumber, first]) {
    const cell = el("th", { scope: "col", class: isNumber ? "n" : null });
    if (by === null) cell.append(text);
    else {
      const mine = this.asked.sort === by;
      if (mine) cell.setAttribute("aria-sort", this.asked.order === "up" ? "ascending" : "descending");
      cell.append(el("button", { class: "sort", "data-sort": by, onclick: () => this.sort(by, first) }, text, el("span", { "aria-hidden": "true" }, mine ? (this.asked.order === "up" ? " ▲" : " ▼") : "")));
    }
    return cell;
  }

  show({ total, matching, offset, peers }) {
    const focused = document.activeElement?.dataset?.sort, left = this.body.querySelector(".wide")?.scrollLeft ?? 0;
    const last = offset + peers.length;
    const range = matching > PAGE ? `${peers.length ? offset + 1 : 0} to ${last} of ` : "";
    this.count.textContent = this.asked.q ? `${range}${matching} that match, of ${total}` : `${range}${total}`;
    this.body.replaceChildren(table("Peers", COLUMNS.map((c) => this.heading(c)), peers.map((p) => peerRow(p, this.now)), this.asked.q ? "no peer matches" : "nobody yet"));
    if (focused) this.body.querySelector(`[data-sort="${focused}"]`)?.focus({ preventScroll: true });
    this.body.querySelector(".wide").scrollLeft = left;
    this.before.disabled = offset === 0;
    this.after.disabled = last >= matching;
    this.before.parentElement.hidden = matching <= PAGE && offset === 0;
  }
}
