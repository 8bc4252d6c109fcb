// Audits: whose update was checked by whom, what was measured, what a jury decided, and what it cost.

import { askOr } from "./api.js";
import { el, number, peerLink, roundLink, table } from "./dom.js";
import { credits, plural, score } from "./format.js";

const PAGE = 25, EVERY = 3000, NAMED = 4;

// Names of peers as links; beyond `most` they are counted.
function names(peers, total = peers.length, most = NAMED) {
  const shown = peers.slice(0, most), cell = el("span");
  shown.forEach((p, i) => cell.append(i ? ", " : "", peerLink(p)));
  if (total > shown.length) cell.append(` and ${total - shown.length} more`);
  return cell;
}

const measured = (s) => `${s.name} ${score(s.value)}, ${s.value !== null && s.value < s.threshold ? "below" : "at least"} ${score(s.threshold)}`;

function reportRow(r) {
  return el("li", { class: r.passed ? "passed" : "failed" }, el("span", { class: "verdict", "data-verdict": r.passed ? "passed" : "failed" }, r.passed ? "passed" : "failed"),
    " ", peerLink(r), ` by ${r.check}: `, r.scores.map(measured).join("; "), " ", el("small", {}, `(in the record of round ${r.carried})`));
}

// Each reporter with its numbers; long lists are folded.
export function reports(c) {
  const list = el("ul", { class: "reports" }, ...c.reports.map(reportRow));
  list.append(el("li", { class: "repeat" }, "Repeat it: ", el("code", {}, `cairn audit update INVITE --round ${c.round} --peer ${c.peer}`)));
  if (c.reports_total > c.reports.length) list.append(el("li", {}, `and ${c.reports_total - c.reports.length} more`));
  const failed = c.reports.filter((r) => !r.passed).length;
  const title = `${plural(c.reports_total, "report")}${c.reports_total === c.reports.length ? `, ${failed} failed` : ""}`;
  return c.reports_total ? el("details", {}, el("summary", {}, title), list) : el("span", { class: "none" }, "not kept here");
}

function summary(c) {
  const by = [...new Map(c.reports.filter((r) => !r.passed).map((r) => [r.peer, r])).values()];
  if (!by.length) return el("span", {}, "every check passed");
  const low = new Map();
  for (const r of c.reports) for (const s of r.scores) {
    if (s.value === null || s.value >= s.threshold) continue;
    const old = low.get(s.name) ?? [s.value, s.value, s.threshold];
    low.set(s.name, [Math.min(old[0], s.value), Math.max(old[1], s.value), Math.max(old[2], s.threshold)]);
  }
  const text = [...low].map(([name, [least, most, needed]]) => `${name} ${least === most ? score(least) : `${score(least)} to ${score(most)}`}, ${score(needed)} is needed`).join("; ");
  const fine = new Set(c.reports.filter((r) => r.passed && r.check !== "loss").map((r) => r.peer)).size;
  return el("span", {}, `${text}; measured by `, names(by), fine ? `; ${fine} found it good` : "");
}

// The cost of a decision, in words.
export function cost(c, now = null) {
  const d = c.decision;
  const cell = el("span");
  if (d.convicted) {
    const voided = d.micro_credits_voided === null ? "its pending credit is void once this record is final" : `${credits(d.micro_credits_voided)} credits void`;
    cell.append(`${voided}; no stake from before; barred until round ${d.barred_until}`);
    if (d.pardoned !== null) cell.append(` (pardoned by the owner in round ${d.pardoned})`);
    else if (now !== null && now >= d.barred_until) cell.append(" (over)");
  } else cell.append(d.refuted_total ? "nothing for it" : "nothing");
  if (d.refuted_total) cell.append("; the stake of ", names(d.refuted, d.refuted_total), ", who reported the opposite");
  return cell;
}

export const outcome = (c) => {
  const word = c.decision === null ? "open" : c.decision.convicted ? "convicted" : "acquitted";
  return el("span", { class: "verdict", "data-verdict": word }, word);
};

function decidedRow(c, now) {
  return el("tr", {},
    el("td", { class: "n", "data-label": "in round" }, roundLink(c.decision.round)), el("td", { class: "name" }, peerLink(c)),
    el("td", {}, outcome(c), c.decision.final ? "" : el("span", { class: "pending" }, " not final")),
    el("td", { class: "n", "data-label": "update of round" }, roundLink(c.round)), el("td", { class: "names" }, summary(c), reports(c)), el("td", { class: "why" }, cost(c, now)));
}

export const undecidedReason = (c) => (c.accusers === 0 ? "a loss check accuses nobody: it has the update trained again"
  : c.accusers === 1 ? "one peer says so: another auditor must, before a jury looks" : "a jury trains it again");

function openRow(c) {
  return el("tr", {}, el("td", { class: "n", "data-label": "update of round" }, roundLink(c.round)), el("td", { class: "name" }, peerLink(c)),
    el("td", { class: "names" }, summary(c), reports(c)), el("td", { class: "why" }, undecidedReason(c)));
}

export class Audits {
  constructor(root) {
    this.offset = 0;
    this.count = el("small", { role: "status" });
    this.decided = el("div", { class: "audits" });
    this.open = el("section", { class: "audits" });
    this.before = el("button", { class: "secondary outline", onclick: () => this.turn(-PAGE) }, "Newer");
    this.after = el("button", { class: "secondary outline", onclick: () => this.turn(PAGE) }, "Older");
    root.append(
      el("div", { class: "bar" }, el("h2", {}, "Decisions ", this.count)),
      this.decided, el("div", { class: "pages", hidden: true }, this.before, this.after), this.open,
      el("p", { class: "note" }, "Peers that are drawn by chance train a part of the others' updates again and compare. Two of them must report a failure; then a jury repeats it, and more than half of its stake decides. ",
        "All of this is in the signed records. The run's owner may report as auditors do, with no more say than one of them, and may pardon the convicted. Scores are what each reporter says that it measured."),
    );
    this.at = 0;
    this.head = null;
  }

  close() { this.closed = true; }

  status(s) {
    this.now = s.round;
    if (s.head === this.head && Date.now() - this.at < 10 * EVERY) return;
    this.head = s.head;
    this.at = Date.now();
    this.load();
  }

  turn(by) {
    this.offset = Math.max(0, this.offset + by);
    this.load();
  }

  async load() {
    const offset = this.offset;
    const found = await askOr(null, "/api/audits", { offset, limit: PAGE });
    if (!found || this.closed || offset !== this.offset) return;
    const shown = JSON.stringify([found, this.now >= 0]);
    if (shown === this.shown) return; // what somebody has unfolded stays so
    this.shown = shown;
    this.count.textContent = found.total ? String(found.total) : "";
    this.decided.replaceChildren(table("Decisions", [["Decided in"], "Peer", "Decision", ["Its update of"], "What was measured, by whom", "What it costs"],
      found.decided.map((c) => decidedRow(c, this.now)), "nobody was convicted or acquitted yet"));
    this.open.replaceChildren(...(found.undecided_total ? [el("h2", {}, "Failed, and not decided ", el("small", {}, String(found.undecided_total))),
      table("Failed checks without a decision", [["Its update of"], "Peer", "What was measured, by whom", "What is next"], found.undecided.map(openRow))] : []));
    this.before.disabled = offset === 0;
    this.after.disabled = offset + found.decided.length >= found.total;
    this.before.parentElement.hidden = found.total <= PAGE && offset === 0;
  }
}

// One peer's cases in plain words, with what its volunteer can do.
export function ownCases(cases, now) {
  if (!cases.length) return null;
  const box = el("section", { class: "cases" }, el("h3", {}, "Audits of its work"));
  for (const c of cases) box.append(c.decision === null ? openCase(c) : decidedCase(c, now));
  return box;
}

function decidedCase(c, now) {
  const d = c.decision;
  if (!d.convicted) {
    return el("article", { class: "case", "data-verdict": "acquitted" }, el("p", {}, outcome(c), " in round ", roundLink(d.round), ": its update of round ", roundLink(c.round), " was accused, and most of a jury's stake found it good. It costs this peer nothing."), reports(c));
  }
  const voided = d.micro_credits_voided === null ? "Its pending credit is void once this record is final" : `Its pending credit (${credits(d.micro_credits_voided)}) is void`;
  const isBarred = d.pardoned === null && now < d.barred_until;
  return el("article", { class: "case" },
    el("p", {}, outcome(c), " in round ", roundLink(d.round), ". Its update of round ", roundLink(c.round), " was not trained as it claims, said most of a jury's stake: ", summary(c), "."),
    el("p", {}, `${voided}, and what it did before is no stake any more. `, isBarred ? `It is barred until round ${d.barred_until}; the run is in round ${now}.` : d.pardoned !== null ? `The run's owner pardoned it in round ${d.pardoned}.` : `Its bar has ended with round ${d.barred_until}.`),
    el("p", {}, el("strong", {}, "What its volunteer can do: "), isBarred
      ? "leave it running. It trains again by itself when the bar ends, as a newcomer: each of its updates is checked until it has stake. Settled credit remains. If the work was honest, find the cause first: faulty memory, an overclocked GPU, another driver or version of Cairn can give other bits. Then write to the run's owner with the number of this round: the owner can pardon, which ends the bar."
      : "nothing more. It may train as a newcomer: each of its updates is checked until it has stake."),
    reports(c));
}

function openCase(c) {
  return el("article", { class: "case", "data-verdict": "open" },
    el("p", {}, outcome(c), ": its update of round ", roundLink(c.round), " failed a check, and nothing is decided: ", summary(c), `. Next: ${undecidedReason(c)}.`),
    el("p", {}, el("strong", {}, "What its volunteer can do: "), "keep it running. Less than half of a jury's stake convicts nobody, so honest work has nothing to fear from one wrong report. If it becomes two, a jury trains the update again: more than half of its stake must find the failure, too. The command below shows what this machine finds."),
    reports(c));
}
