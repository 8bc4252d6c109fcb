// Numbers, times and names as people read them.

export function short(n) {
  if (n === null || n === undefined) return "–";
  for (const [top, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) if (Math.abs(n) >= top) return (n / top).toFixed(1) + unit;
  return Number.isInteger(n) ? String(n) : n.toFixed(Math.abs(n) < 10 ? 2 : 0);
}

export const score = (n) => (n === null ? "–" : String(Number(n.toPrecision(3))));

export function bytes(n) {
  if (n === null || n === undefined) return "–";
  for (const [top, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) if (n >= top) return (n / top).toFixed(1) + " " + unit;
  return `${Math.round(n)} B`;
}

export const loss = (n) => (n === null || n === undefined ? "–" : n.toFixed(3));

// The exponential of a loss: among how many tokens, as it were, the model hesitates.
export function perplexity(n) {
  if (n === null || n === undefined) return "–";
  const p = Math.exp(n);
  return p < 1000 ? p.toPrecision(3) : short(p);
}

// Credits with three significant digits, as `credit_text` in protocol/ledger/credit_text.py writes them; whole numbers, so that both round alike.
export function credits(micro) {
  const unit = 10 ** Math.max(0, String(micro).length - 3);
  const kept = Math.floor((micro + Math.floor(unit / 2)) / unit) * unit;
  const [prefix, size] = [["T", 18], ["B", 15], ["M", 12], ["k", 9]].find(([, digits]) => kept >= 10 ** digits) ?? ["", 6];
  if (!kept) return "0";
  const digits = Math.min(6, Math.max(0, size + 3 - String(kept).length));
  return (kept / 10 ** size).toFixed(digits) + prefix;
}

export function duration(s) {
  if (s === null || s === undefined) return "–";
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  return s < 172800 ? `${(s / 3600).toFixed(1)} h` : `${Math.round(s / 86400)} d`;
}

export const moment = (t) => new Date(t * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
export const shortKey = (key) => key.slice(0, 8);
export const peerName = (p) => p.name || shortKey(p.peer);
export const plural = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;
