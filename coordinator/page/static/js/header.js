// The state of the run, as a sentence and in numbers.

import { byId, el, say } from "./dom.js";
import { duration, short } from "./format.js";

const link = (where, text) => el("a", { href: where }, text);

// What somebody who looks can do; nothing where all is well.
const ADVICE = {
  waiting: () => ["Be the first: ", link("#join", "take part"), "."],
  idle: (s) => [link("#join", "Take part"), `, and training goes on from round ${s.round}.`],
  stalled: () => ["Volunteers: leave your peers running, they keep their work. ", link("#peers", "Peers"), " says what each of them does; their logs say why."],
  split: () => ["Peers return to the chain by themselves. If yours is named here for long, its log says why."],
  "catching up": () => ["Nothing to do: peers train meanwhile."],
  trouble: () => ["Nothing to do for volunteers: peers go on. The run's owner finds the cause in the coordinator's log."],
  paused: () => ["Nothing to do: peers keep their work, and go on by themselves when the owner resumes."],
  finished: () => ["Take the model with you: ", link("#model", "its checkpoints"), "."],
  ended: () => ["What was trained is kept: ", link("#model", "its checkpoints"), "."],
};
export const isOver = (s) => ["finished", "ended"].includes(s.health);
let advised = "";

function advise(s) {
  const said = `${s.health} ${s.round}`;
  if (said === advised) return;
  advised = said;
  byId("advice").hidden = !(s.health in ADVICE);
  byId("advice").replaceChildren(...(ADVICE[s.health]?.(s) ?? []));
  byId("take-part").hidden = isOver(s);
}

export function showHeader(s) {
  document.title = `${s.health} · ${s.name}`;
  say("name", s.name);
  byId("state").dataset.health = s.health;
  say("health", s.health);
  say("message", s.message);
  showAlerts(s.alerts);
  advise(s);
  byId("lost").hidden = true;
  byId("goal").hidden = !s.total_tokens;
  if (s.total_tokens) {
    const share = Math.min(1, s.tokens / s.total_tokens), left = s.total_tokens - s.tokens;
    byId("progress").value = share;
    const when = s.health === "healthy" && s.tokens_per_second && left > 0 ? `, about ${duration(left / s.tokens_per_second)} to go` : "";
    say("progress-text", `${short(s.tokens)} of ${short(s.total_tokens)} tokens (${(100 * share).toFixed(share < 0.1 ? 1 : 0)}%)${when}`);
  }
  say("run", s.run);
  say("digest", `${s.state.slice(0, 16)}…`);
}

function showAlerts(alerts) {
  const list = byId("alerts"), now = Date.now() / 1000;
  list.hidden = !alerts.length;
  list.replaceChildren(...alerts.map((a) => el("li", {}, el("strong", {}, `Alert, ${a.name}:`), ` ${a.message} (for ${duration(Math.max(0, now - a.since))})`)));
}

export function showLost(heardAt) {
  document.title = "no answer · Cairn";
  byId("state").dataset.health = "lost";
  say("health", "no answer");
  byId("lost").hidden = false;
  say("lost", heardAt
    ? `The coordinator does not answer. This is how it was at ${heardAt.toLocaleTimeString()}; peers go on training without it.`
    : "The coordinator does not answer, or too many people watch at once. Trying again.");
}
