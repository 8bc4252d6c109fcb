// Who contributed most: by peer, by account, by team; of the whole run, or of one team.

import { askOr } from "./api.js";
import { el, facts, number, table, teamLink } from "./dom.js";
import { credits, shortKey, short } from "./format.js";

const PAGE = 25;

// The totals of an account or a team.
export const totals = (l) => facts([["Credits", credits(l.micro_credits_settled)], ["Pending", credits(l.micro_credits_pending)], ["Voided", credits(l.micro_credits_voided)],
  ["A day", l.recent === null ? "–" : credits(l.recent)], ["Tokens", short(l.tokens)], ["Rounds", String(l.rounds)]]);

export class Leaderboard {
  constructor(root, team = "") {
    this.team = team;
    const every = team ? ["account", "peer"] : ["peer", "account", "team"];
    this.by = every[0];
    this.afters = [];
    this.totals = el("div");
    this.body = el("div");
    this.buttons = every.map((by) => el("button", { class: "secondary outline", "data-by": by, onclick: () => this.choose(by) }, `by ${by}`));
    this.before = el("button", { class: "secondary outline", onclick: () => { this.afters.pop(); this.load(); } }, "Previous");
    this.after = el("button", { class: "secondary outline", onclick: () => { this.afters.push(this.last); this.load(); } }, "Next");
    root.append(
      el("div", { class: "bar" }, el("h2", {}, team ? `Team ${team}` : "Leaderboard"), el("div", { class: "choice", role: "group", "aria-label": "By" }, ...this.buttons)),
      this.totals, this.body, el("div", { class: "pages" }, this.before, this.after),
      team ? "" : el("p", { class: "note" }, "One credit is 10", el("sup", {}, "15"), " FLOPs of accepted training, computed from the chain, and is here once its round is final. All of them as a file: ",
        el("a", { href: "/api/export/credits.csv" }, "CSV"), ", ", el("a", { href: "/api/export/credits.parquet" }, "Parquet"), "."),
    );
    this.head = null;
  }

  close() { this.closed = true; }

  status(s) {
    if (s.head === this.head) return;
    this.head = s.head;
    this.load();
    if (this.team) this.addUp();
  }

  choose(by) {
    this.by = by;
    this.afters = [];
    this.load();
  }

  async addUp() {
    const found = await askOr(null, "/api/leaderboard", { by: "team", team: this.team, limit: 1 });
    if (found) this.totals.replaceChildren(...found.map(totals));
  }

  async load() {
    for (const b of this.buttons) b.setAttribute("aria-pressed", String(b.dataset.by === this.by));
    const { by, team } = this, hasTeam = by !== "team" && !team;
    const found = await askOr(null, "/api/leaderboard", { by, team, limit: PAGE, after: this.afters.at(-1) });
    if (!found || this.closed || by !== this.by) return;
    this.last = found.at(-1)?.key;
    const first = PAGE * this.afters.length;
    this.body.replaceChildren(table(`Leaderboard by ${by}`, [["#"], "Name", ...(hasTeam ? ["Team"] : []), ["Credits"], ["Pending"], ["A day"], ["Tokens"], ["Rounds"]], found.map((l, i) =>
      el("tr", {}, number(String(first + i + 1)),
        el("td", { class: "name", title: l.key }, by === "team" ? teamLink(l.key) : el("a", { href: `#${by}/${l.key}` }, l.name || shortKey(l.key))),
        ...(hasTeam ? [el("td", { class: "name", title: l.team }, l.team ? teamLink(l.team) : "–")] : []),
        number(credits(l.micro_credits_settled)), number(l.micro_credits_pending ? credits(l.micro_credits_pending) : "–", { class: "n pending" }),
        number(l.recent === null ? "–" : credits(l.recent)), number(short(l.tokens)), number(String(l.rounds)))),
    by === "peer" ? "no credits yet" : team ? "no account of this run names this team" : `no ${by} yet: a volunteer binds peers to one with \`cairn account\``));
    this.before.disabled = !this.afters.length;
    this.after.disabled = found.length < PAGE;
    this.before.parentElement.hidden = found.length < PAGE && !this.afters.length;
  }
}
