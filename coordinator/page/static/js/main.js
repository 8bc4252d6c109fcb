// Which view is shown, and the live stream that feeds it. A view has `status(s)` and `close()`.

import { Audits } from "./audits.js";
import { byId } from "./dom.js";
import { showHeader, showLost } from "./header.js";
import { Join } from "./join.js";
import { Leaderboard } from "./leaderboard.js";
import { listen } from "./live.js";
import { Model } from "./model.js";
import { Overview } from "./overview.js";
import { Account, Peer } from "./peer.js";
import { Peers } from "./peers.js";
import { Round, Rounds } from "./rounds.js";

const KEY = /^[0-9a-f]{64}$/;
let view = null, newest = null;

// The name of a team, which may have any characters, from the address; "" where somebody has broken it.
function teamOf(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return "";
  }
}

function make(root) {
  const [name, which = ""] = location.hash.slice(1).split("/");
  if (name === "peer" && KEY.test(which)) return new Peer(root, which);
  if (name === "account" && KEY.test(which)) return new Account(root, which);
  if (name === "team" && teamOf(which)) return new Leaderboard(root, teamOf(which));
  if (name === "round" && /^[0-9]{1,12}$/.test(which)) return new Round(root, Number(which));
  if (name === "peers") return new Peers(root);
  if (name === "rounds") return new Rounds(root);
  if (name === "audits") return new Audits(root);
  if (name === "leaderboard") return new Leaderboard(root);
  if (name === "model") return new Model(root);
  if (name === "join") return new Join(root);
  return new Overview(root);
}

const TAB_OF = { peer: "#peers", account: "#leaderboard", team: "#leaderboard", round: "#rounds" };

function turn(moved) {
  view?.close();
  const root = byId("view");
  root.replaceChildren();
  view = make(root);
  const hash = location.hash.split("/")[0], here = TAB_OF[hash.slice(1)] ?? (hash || "#");
  const tabs = byId("tabs");
  for (const tab of [...tabs.children, byId("take-part")]) {
    if (tab.getAttribute("href") === here) {
      tab.setAttribute("aria-current", "page");
      if (tab.parentElement === tabs) tabs.scrollLeft = tab.offsetLeft + tab.offsetWidth - tabs.offsetLeft - tabs.clientWidth; // on a narrow screen
    } else tab.removeAttribute("aria-current");
  }
  if (newest) view.status(newest);
  if (moved) root.focus({ preventScroll: true });
}

addEventListener("hashchange", () => {
  if (location.hash !== "#view") turn(true); // the link that skips to the view is no view
});
turn(false);
listen((s) => {
  newest = s;
  showHeader(s);
  view.status(s);
}, showLost);
