// Checks in the browser that a receipt's round is in the coordinator's log (RFC 9162), with what the coordinator gave.
// It shows that the log and its newest signed head agree; who signed it, and every credit, `cairn audit ledger` checks.

import { ask } from "./api.js";

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const hexOf = (bytes) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
const fromHex = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
const same = (a, b) => a.length === b.length && a.every((v, i) => v === b[i]);

async function sha256(prefix, ...parts) {
  const whole = new Uint8Array(1 + parts.reduce((n, p) => n + p.length, 0));
  whole[0] = prefix;
  let at = 1;
  for (const p of parts) { whole.set(p, at); at += p.length; }
  return new Uint8Array(await crypto.subtle.digest("SHA-256", whole));
}
const leaf = (data) => sha256(0, data);
const join = (left, right) => sha256(1, left, right);

// A protobuf message's fields: numbers as numbers, the rest as bytes.
export function fields(data) {
  const found = new Map();
  let at = 0;
  const varint = () => {
    let value = 0n;
    for (let shift = 0n; shift < 70n; shift += 7n) {
      if (at >= data.length) throw new Error("a message that is cut short");
      const b = data[at++];
      value |= BigInt(b & 127) << shift;
      if (b < 128) return value;
    }
    throw new Error("a number that never ends");
  };
  while (at < data.length) {
    const tag = Number(varint());
    if ((tag & 7) === 0) found.set(tag >> 3, Number(varint()));
    else if ((tag & 7) === 2) {
      const size = Number(varint());
      if (at + size > data.length) throw new Error("a message that is cut short");
      found.set(tag >> 3, data.subarray(at, (at += size)));
    } else throw new Error("a field of a kind that the log does not have");
  }
  return found;
}

export async function rootOf(leaves) {
  let level = leaves;
  while (level.length > 1) {
    const next = [];
    for (let i = 0; i + 1 < level.length; i += 2) next.push(await join(level[i], level[i + 1]));
    if (level.length % 2) next.push(level.at(-1));
    level = next;
  }
  return level[0];
}

// RFC 9162, section 2.1.3.2: the root to which a path leads from leaf number `index` of `size`.
export async function rootBy(path, start, index, size) {
  let fn = index, sn = size - 1, r = start;
  for (const p of path) {
    if (sn === 0) throw new Error("the proof is too long");
    if (fn % 2 || fn === sn) {
      r = await join(p, r);
      while (fn % 2 === 0 && fn) { fn = Math.floor(fn / 2); sn = Math.floor(sn / 2); }
    } else r = await join(r, p);
    fn = Math.floor(fn / 2);
    sn = Math.floor(sn / 2);
  }
  if (sn) throw new Error("the proof is too short");
  return r;
}

export const possible = () => Boolean(globalThis.crypto?.subtle);

// Resolves with a sentence when all holds; throws an error with a sentence when something does not.
export async function checkReceipt(receipt, peer) {
  const { heads } = await ask("/api/log/head");
  const head = fields(fields(bytesOf(heads[0])).get(2));
  const size = head.get(2) ?? 0, root = head.get(3);
  if (receipt.entry >= size) throw new Error("the newest signed head does not cover this round yet: try again in a minute");
  const { entries } = await ask("/api/log/entries", { first: receipt.entry, limit: 1 });
  const entry = bytesOf(entries[0]), round = fields(fields(entry).get(5));
  if ((round.get(1) ?? 0) !== receipt.round || hexOf(round.get(2)) !== receipt.record) throw new Error("the log's entry is of another round");
  const { hashes } = await ask("/api/log/inclusion", { entry: receipt.entry, size });
  const reached = await rootBy(hashes.map(fromHex), await leaf(entry), receipt.entry, size);
  if (!same(reached, root)) throw new Error("the proof does not lead to the signed head's root");
  if (!receipt.accepted) return `the entry is number ${receipt.entry} of ${size} under the signed root ${hexOf(root).slice(0, 16)}…; the update is not in it`;
  const { groups } = await ask("/api/log/lines", { first: receipt.entry, limit: 1 });
  const lines = (groups[0]?.lines ?? []).map(bytesOf);
  if (!same(await rootOf(await Promise.all(lines.map(leaf))), round.get(4))) throw new Error("the round's lines are not those that the entry names");
  const line = fields(lines[receipt.line]);
  if (hexOf(line.get(1)) !== peer || hexOf(line.get(2)) !== receipt.update || (line.get(5) ?? 0) !== receipt.micro_credits) throw new Error("the line in the log is not what the receipt says");
  return `line ${receipt.line} of entry ${receipt.entry}, in a log of ${size} under the signed root ${hexOf(root).slice(0, 16)}…`;
}
