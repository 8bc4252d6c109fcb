// How to take part: the one line to run, how to install Cairn, the invite as a QR code.

import { askOr } from "./api.js";
import { el } from "./dom.js";
import { bytes, short } from "./format.js";
import { isOver } from "./header.js";

// Name, lines to run, note.
const PLATFORMS = [
  ["Linux, x86-64, with an NVIDIA GPU", ["pipx install ."], "In a clone of Cairn's repository, with Python 3.10 to 3.13."],
  ["Linux, x86-64, without a GPU", ["pipx install --pip-args='--extra-index-url https://download.pytorch.org/whl/cpu' ."], "In a clone, too. It leaves out CUDA's gigabytes; a CPU trains slowly."],
  ["Container", [
    "docker build -t cairn-peer -f docker/peer.Dockerfile .",
    "docker run -d --name cairn --gpus all --shm-size 1g --stop-timeout 60 -v cairn:/data cairn-peer peer join INVITE --device cuda",
  ], "In a clone; for NVIDIA GPUs, with the NVIDIA Container Toolkit. The second line joins, in place of step 2."],
  ["Windows", ["wsl --install"], "Then, in that Linux (WSL2), as on Linux. Nobody has tested this yet."],
];

const WHY_NOT = {
  invite: "This run admits by invite: its owner gives the invite to whom they want. With it, this is all:",
  allow: "This run admits only the keys on its owner's list. With one of them and an invite, this is all:",
};

// A line to copy. Where the browser keeps the clipboard to itself (plain http), the line is selected.
export function copyable(line) {
  const code = el("code", {}, line), said = el("span", { role: "status", class: "note" });
  const button = el("button", { class: "secondary outline small", onclick: async () => {
    try {
      await navigator.clipboard.writeText(line);
      said.textContent = "copied";
    } catch {
      getSelection().selectAllChildren(code);
      said.textContent = document.execCommand("copy") ? "copied" : "selected: press Ctrl-C";
    }
  } }, "Copy");
  return el("div", { class: "line" }, code, el("div", {}, button, " ", said));
}

export class Join {
  constructor(root) {
    this.body = el("div", {}, el("p", { "aria-busy": "true" }, "asking"));
    root.append(this.body);
    this.health = null;
  }

  close() { this.closed = true; }

  status(s) {
    if (s.health === this.health) return;
    this.health = s.health;
    this.load(s);
  }

  async load(s) {
    const run = await askOr(null, "/api/run");
    if (this.closed) return;
    if (!run) {
      this.health = null; // asked again with the next event
      return;
    }
    const { invite, local, admission } = run.join;
    if (isOver(s)) {
      this.body.replaceChildren(el("h2", {}, "Take part"), el("p", {}, "This run is over: there is nothing left to train. ", el("a", { href: "#model" }, "Its checkpoints"), " are here."));
      return;
    }
    const invited = (line) => copyable(line.replace("INVITE", invite ?? "INVITE"));
    const line = invited("cairn peer join INVITE");
    const install = PLATFORMS.map(([name, lines, note], i) => el("details", { open: i === 0, name: "platform" }, el("summary", {}, name), ...lines.map(invited), el("p", { class: "note" }, note)));
    this.body.replaceChildren(
      el("h2", {}, "Take part"),
      el("p", {}, `A peer of this run trains `, el("a", { href: "#model" }, `a model of ${short(run.model.parameters)} parameters`), ` on windows of data of its own, and exchanges updates with the others after each round. It needs no account and no open port. It first downloads the model (${bytes(run.model.bytes)}), then its data.`),
      el("div", { class: "join" },
        el("div", {},
          el("h3", {}, "1. Install Cairn"), ...install,
          el("p", { class: "note" }, "macOS and Linux on ARM are not supported."),
          el("h3", {}, "2. Join"),
          invite === null ? el("p", {}, WHY_NOT[admission]) : "",
          line,
          local ? el("p", { class: "missed" }, "This invite leads to the coordinator's own machine only: it was started without --public.") : "",
          el("p", { class: "note" }, el("code", {}, "--name ada"), " gives your peer a name. Ctrl-C leaves in order; the same line goes on later."),
          el("p", { class: "note" }, "Everybody sees on this page your peer's key, name, device, speed and credits. The other peers see its address.")),
        invite === null ? "" : el("figure", {}, el("img", { src: "/invite.svg", alt: "The invite as a QR code", width: "260", height: "260" }), el("figcaption", {}, "The invite, to carry it to another machine"))),
    );
  }
}
