// Who contributed most: by peer, by account, by team.

import { askOr } from "./api.js";
import { el, number, table } from "./dom.js";
import { credits, shortKey, short } from "./format.js";

const PAGE = 25;
const BY = ["peer", "account", "team"];

export class Leaderboard {
  constructor(root) {
    this.by = "peer";
    this.afters = [];
    this.body = el("div");
    this.buttons = BY.map((by) => el("button", { class: "secondary outline", "data-by": by, onclick: () => this.choose(by) }, `by ${by}`));
    this.before = el("button", { class: "secondary outline", onclick: () => { this.afters.pop(); this.load(); } }, "Previous");
    this.after = el("button", { class: "secondary outline", onclick: () => { this.afters.push(this.last); this.load(); } }, "Next");
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Leaderboard"), el("div", { class: "choice", role: "group", "aria-label": "By" }, ...this.buttons)),
      this.body, el("div", { class: "pages" }, this.before, this.after),
      el("p", { class: "note" }, "One credit is 10", el("sup", {}, "15"), " FLOPs of accepted training, computed from the chain, and is here once its round is final. All of them as a file: ",
        el("a", { href: "/api/export/credits.csv" }, "CSV"), ", ", el("a", { href: "/api/export/credits.parquet" }, "Parquet"), "."),
    );
    this.head = null;
  }

  close() { this.closed = true; }

  status(s) {
    if (s.head === this.head) return;
    this.head = s.head;
    this.load();
  }

  choose(by) {
    this.by = by;
    this.afters = [];
    this.load();
  }

  async load() {
    for (const b of this.buttons) b.setAttribute("aria-pressed", String(b.dataset.by === this.by));
    const by = this.by;
    const found = await askOr(null, "/api/leaderboard", { by, limit: PAGE, after: this.afters.at(-1) });
    if (!found || this.closed || by !== this.by) return;
    this.last = found.at(-1)?.key;
    const first = PAGE * this.afters.length;
    this.body.replaceChildren(table(`Leaderboard by ${by}`, [["#"], "Name", ...(by === "team" ? [] : ["Team"]), ["Credits"], ["Pending"], ["A day"], ["Tokens"], ["Rounds"]], found.map((l, i) => {
      const name = l.name || (by === "team" ? l.key : shortKey(l.key));
      return el("tr", {}, number(String(first + i + 1)),
        el("td", { class: "name", title: l.key }, by === "team" ? name : el("a", { href: `#${by}/${l.key}` }, name)),
        ...(by === "team" ? [] : [el("td", {}, l.team || "–")]),
        number(credits(l.micro_credits_settled)), number(l.micro_credits_pending ? credits(l.micro_credits_pending) : "–", { class: "n pending" }),
        number(l.recent === null ? "–" : credits(l.recent)), number(short(l.tokens)), number(String(l.rounds)));
    }), by === "peer" ? "no credits yet" : `no ${by} yet: a volunteer binds peers to one with \`cairn account\``));
    this.before.disabled = !this.afters.length;
    this.after.disabled = found.length < PAGE;
    this.before.parentElement.hidden = found.length < PAGE && !this.afters.length;
  }
}
