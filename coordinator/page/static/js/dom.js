// Elements. Everything that strangers chose (names, devices) enters as text, never as markup.

export function el(tag, attributes = {}, ...children) {
  const e = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) e.addEventListener(name.slice(2), value);
    else if (name === "text") e.textContent = value;
    else e.setAttribute(name, value === true ? "" : value);
  }
  e.append(...children.filter((c) => c !== null && c !== undefined).map((c) => (c instanceof Node ? c : String(c))));
  return e;
}

export function svg(tag, attributes = {}) {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) e.setAttribute(name, value);
  return e;
}

export const byId = (id) => document.getElementById(id);

// Text changes only where it differs, so that a screen reader is not told the same thing again.
export function say(id, text) {
  const e = byId(id);
  if (e.textContent !== text) e.textContent = text;
}

export const number = (text, attributes = {}) => el("td", { class: "n", ...attributes }, text);
export const peerLink = (p) => el("a", { href: `#peer/${p.peer}`, title: p.peer }, p.name || p.peer.slice(0, 8));
export const teamLink = (name) => el("a", { href: `#team/${encodeURIComponent(name)}` }, name);
export const roundLink = (n) => el("a", { href: `#round/${n}` }, String(n));

// A table that scrolls sideways by itself on a phone; `name` is for those who cannot see it.
export function table(name, heads, rows, none = "none yet") {
  const head = el("tr", {}, ...heads.map((h) => (h instanceof Node ? h : typeof h === "string" ? el("th", { scope: "col" }, h) : el("th", { scope: "col", class: "n" }, h[0]))));
  const body = el("tbody", {}, ...(rows.length ? rows : [el("tr", {}, el("td", { colspan: heads.length, class: "none" }, none))]));
  return el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": name }, el("table", {}, el("thead", {}, head), body));
}

export const facts = (pairs) => el("dl", { class: "facts" }, ...pairs.map(([term, value]) => el("div", {}, el("dt", {}, term), el("dd", {}, value))));
