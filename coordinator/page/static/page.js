// Draws what the coordinator sends. Everything from peers (names, devices) enters as text, never as markup.
"use strict";

const $ = (id) => document.getElementById(id);
let shownRound = null, asking = false, again = false;

function short(n) {
  if (n === null || n === undefined) return "–";
  for (const [top, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(n) >= top) return (n / top).toFixed(1) + unit;
  return Number.isInteger(n) ? String(n) : n.toFixed(n < 10 ? 2 : 0);
}
const bytes = (n) => (n === null ? "–" : short(n) + "B");
const loss = (n) => (n === null ? "–" : n.toFixed(3));
function credits(micro) {
  const c = micro / 1e6;
  return c >= 1000 ? short(c) : c >= 10 ? c.toFixed(1) : c >= 0.1 ? c.toFixed(2) : micro ? short(micro) + " µ" : "0";
}
const ago = (s) => (s < 90 ? Math.round(s) + " s" : s < 5400 ? Math.round(s / 60) + " min" : (s / 3600).toFixed(1) + " h");

function element(tag, text, attributes) {
  const e = document.createElement(tag);
  if (text !== undefined) e.textContent = text;
  for (const [name, value] of Object.entries(attributes || {})) name === "data-phase" ? e.setAttribute(name, value) : (e[name] = value);
  return e;
}
const row = (cells, className) => {
  const tr = element("tr", undefined, { className: className || "" });
  tr.append(...cells);
  return tr;
};
const n = (text) => element("td", text, { className: "n" });

function facts(s) {
  const peers = `${s.training}` + (s.peers_in_all > s.training ? ` of ${s.peers_in_all}` : "");
  const all = [
    ["Training", peers], ["Round", s.round], ["Loss", loss(s.loss)], ["Tokens/s", short(s.tokens_per_second)],
    ["Tokens", short(s.tokens)], ["Credits", credits(s.micro_credits_settled + s.micro_credits_pending)],
    ["Final up to", s.final_round === null ? "–" : `round ${s.final_round}`],
  ];
  $("facts").replaceChildren(...all.map(([term, value]) => {
    const box = element("div");
    box.append(element("dt", term), element("dd", String(value)));
    return box;
  }));
}

function peers(s) {
  $("peers-words").textContent = s.peers_in_all > s.peers.length ? `the first ${s.peers.length} of ${s.peers_in_all}` : "";
  const rows = s.peers.map((p) => {
    const away = p.phase === "silent" || p.phase === "gone";
    const since = away && p.seconds_since_heard !== null ? ` ${ago(p.seconds_since_heard)}` : "";
    const state = element("td");
    state.append(element("span", p.phase + since, { className: "phase", "data-phase": p.phase }));
    const earned = element("td", undefined, { className: "n" });
    earned.append(credits(p.micro_credits_settled));
    if (p.micro_credits_pending) earned.append(element("span", " +" + credits(p.micro_credits_pending), { className: "pending" }));
    return row([
      element("td", p.name, { className: "name", title: p.peer }), state, n(p.round === null ? "–" : String(p.round)), n(loss(p.loss)),
      n(away ? "–" : short(p.tokens_per_second === null ? null : Math.round(p.tokens_per_second))), n(bytes(p.bytes_up)), n(bytes(p.bytes_down)), earned,
      element("td", p.device || "–", { className: "device", title: p.device || "" }),
    ], away ? "away" : "");
  });
  if (!rows.length) rows.push(row([element("td", "nobody yet", { colSpan: 9 })]));
  $("peers").replaceChildren(...rows);
}

function rounds(s) {
  const rows = s.rounds.map((r) => {
    const more = r.contributors_in_all - r.contributors.length;
    const absent = r.absent === null ? "not observed" : r.absent.length ? r.absent.join(", ") : "–";
    return row([
      n(String(r.round)), n(loss(r.loss)), n(short(r.tokens)),
      element("td", r.contributors.join(", ") + (more > 0 ? ` and ${more} more` : ""), { className: "names" }),
      element("td", absent, { className: r.absent && r.absent.length ? "names missed" : "names" }),
      element("td", r.record.slice(0, 8) + (r.final ? " final" : ""), { title: r.record, className: r.final ? "" : "pending" }),
    ]);
  });
  if (!rows.length) rows.push(row([element("td", "none yet", { colSpan: 6 })]));
  $("rounds").replaceChildren(...rows);
}

function show(s) {
  document.title = `${s.health} · ${s.name}`;
  $("name").textContent = s.name;
  $("state").dataset.health = s.health;
  $("health").textContent = s.health;
  $("words").textContent = s.words;
  $("lost").hidden = true;
  $("goal").hidden = !s.total_tokens;
  if (s.total_tokens) {
    $("progress").value = Math.min(1, s.tokens / s.total_tokens);
    $("progress-words").textContent = `${short(s.tokens)} of ${short(s.total_tokens)} tokens`;
  }
  $("run").textContent = s.run;
  $("digest").textContent = s.state.slice(0, 16) + "…";
  facts(s);
  peers(s);
  rounds(s);
  if (s.head !== shownRound) {
    shownRound = s.head;
    charts();
  }
}

// -- charts ---------------------------------------------------------------------------------------------------

const drawn = {};
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function chart(id, series, xs, ys, time) {
  const box = $(id);
  box.nextElementSibling.hidden = xs.length > 0;
  box.hidden = xs.length === 0;
  if (!xs.length) return;
  const data = [xs, ys];
  if (drawn[id]) return drawn[id].setData(data);
  const axis = { stroke: color("--pico-muted-color"), grid: { stroke: color("--pico-muted-border-color"), width: 1 }, ticks: { show: false }, font: "12px system-ui, sans-serif" };
  const clock = (t, step) => step >= 86400 ? new Date(t * 1000).toLocaleDateString([], { month: "short", day: "numeric" })
    : new Date(t * 1000).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", ...(step < 60 ? { second: "2-digit" } : {}), hour12: false });
  const times = (_, ticks, axisIndex, space, step) => ticks.map((t) => clock(t, step));
  const values = (_, ticks) => ticks.map((v) => (v === null ? "" : short(v).replace(".0", "")));
  drawn[id] = new uPlot({
    width: box.clientWidth, height: 230, padding: [8, 12, 0, 0],
    scales: { x: { time } },
    axes: [{ ...axis, values: time ? times : values, space: 70, size: 30 }, { ...axis, values, size: 52 }],
    series: [{ label: time ? "Time" : "Tokens", value: (_, v) => (v === null ? "–" : time ? new Date(v * 1000).toLocaleString() : short(v)) },
             { label: series, stroke: color("--good"), width: 2, points: { show: xs.length < 3 }, value: (_, v) => (v === null ? "–" : time ? short(v) : v.toFixed(3)) }],
  }, data, box);
}

async function charts() {
  if (asking) { again = true; return; }
  asking = true;
  try {
    const answer = await fetch("/api/charts");
    if (answer.ok) {
      const c = await answer.json();
      chart("loss", "Loss", c.tokens, c.loss, false);
      chart("rate", "Tokens/s", c.times, c.rates, true);
    }
  } catch (e) {
    console.error("charts:", e);
    shownRound = null; // asked again with the next event
  }
  asking = false;
  if (again) { again = false; charts(); }
}

function redraw() {
  for (const id of Object.keys(drawn)) { drawn[id].destroy(); delete drawn[id]; }
  charts();
}

let resizing = 0;
addEventListener("resize", () => {
  clearTimeout(resizing);
  resizing = setTimeout(() => { for (const [id, plot] of Object.entries(drawn)) plot.setSize({ width: $(id).clientWidth, height: 230 }); }, 100);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);

// -- live -----------------------------------------------------------------------------------------------------

let heardAt = null;
function connect() {
  const events = new EventSource("/events");
  events.onmessage = (event) => { heardAt = new Date(); show(JSON.parse(event.data)); };
  events.onerror = () => {
    $("state").dataset.health = "lost";
    $("health").textContent = "no answer";
    $("lost").hidden = false;
    $("lost").textContent = heardAt
      ? `The coordinator does not answer. This is how it was at ${heardAt.toLocaleTimeString()}; peers go on training without it.`
      : "The coordinator does not answer, or too many people watch at once. Trying again.";
    if (events.readyState === EventSource.CLOSED) setTimeout(connect, 5000); // refused: the browser does not try again itself
  };
}
connect();
