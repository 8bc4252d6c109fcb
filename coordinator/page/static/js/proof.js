// Checks in the browser that a receipt says what the record of its round says, from the record's bytes and their digest.
// The votes under the record, and that the swarm's chain has it, `cairn audit ledger` checks.

import { ask } from "./api.js";

const bytesOf = (base64) => Uint8Array.from(atob(base64), (c) => c.charCodeAt(0));
const hexOf = (bytes) => [...bytes].map((b) => b.toString(16).padStart(2, "0")).join("");
const fromHex = (hex) => Uint8Array.from(hex.match(/../g) ?? [], (pair) => parseInt(pair, 16));
const ascii = (text) => new TextEncoder().encode(text);

async function sha256(...parts) {
  const whole = new Uint8Array(parts.reduce((n, p) => n + p.length, 0));
  let at = 0;
  for (const p of parts) { whole.set(p, at); at += p.length; }
  return new Uint8Array(await crypto.subtle.digest("SHA-256", whole));
}

// The varint at a place, and the place after it.
function varint(data, at) {
  let value = 0n;
  for (let shift = 0n; shift < 70n; shift += 7n) {
    if (at >= data.length) throw new Error("a message that is cut short");
    const b = data[at++];
    value |= BigInt(b & 127) << shift;
    if (b < 128) return [Number(value), at];
  }
  throw new Error("a number that never ends");
}

// A protobuf message's fields, each a list: numbers as numbers, bytes as bytes, doubles and floats as bytes.
export function fields(data) {
  const found = new Map();
  let at = 0;
  const number = () => {
    let value;
    [value, at] = varint(data, at);
    return value;
  };
  while (at < data.length) {
    const tag = number(), kind = tag & 7;
    let value;
    if (kind === 0) value = number();
    else {
      const size = kind === 2 ? number() : kind === 5 ? 4 : kind === 1 ? 8 : NaN;
      if (!(at + size <= data.length)) throw new Error("a message that is cut short");
      value = data.subarray(at, (at += size));
    }
    found.set(tag >> 3, [...(found.get(tag >> 3) ?? []), value]);
  }
  return found;
}

// The numbers of a repeated field: one by one, or packed into bytes, as its sender likes.
function numbers(values) {
  return values.flatMap((value) => {
    if (typeof value === "number") return [value];
    const found = [];
    for (let at = 0, number; at < value.length; found.push(number)) [number, at] = varint(value, at);
    return found;
  });
}

// The payload of an envelope, its author, and the digest of both by which records and headers are named.
export async function opened(envelope, kind) {
  const parts = fields(envelope), payload = parts.get(2)?.[0] ?? new Uint8Array(), key = parts.get(3)?.[0] ?? new Uint8Array();
  const name = `cairn/v1/${kind}`;
  const digest = await sha256(ascii("cairn/v1/digest"), key, ascii(`DSSEv1 ${name.length} ${name} ${payload.length} `), payload);
  return { body: fields(payload), author: hexOf(key), digest };
}

export const possible = () => Boolean(globalThis.crypto?.subtle);

// Resolves with a sentence when all holds; throws an error with a sentence when something does not.
export async function checkReceipt(receipt, peer) {
  const { bytes, shards } = await ask(`/api/rounds/${receipt.round}/certificate`);
  const record = await opened(bytesOf(bytes.record), "round-record");
  let digest = record.digest;
  if (shards.length) digest = await sha256(ascii("cairn/v1/applied"), digest, await sha256(ascii("cairn/v1/shards"), ...shards.map(fromHex)));
  if (hexOf(digest) !== receipt.record) throw new Error("the record of this round is not the one that the receipt names");
  const headers = await Promise.all((record.body.get(6) ?? []).map((e) => opened(e, "update-header")));
  const place = headers.findIndex((h) => hexOf(h.digest) === receipt.update && h.author === peer), mine = headers[place];
  const said = `record ${receipt.record.slice(0, 16)}… of ${headers.length} updates`;
  if (!receipt.accepted) {
    if (mine) throw new Error("the record lists the update");
    return `the update is not in ${said}`;
  }
  if (!mine) throw new Error("the record does not list the update");
  // As the record weighs them, for example a newcomer's; without weights each update weighs what it claims.
  const weights = numbers(record.body.get(8) ?? []);
  const windows = weights.length ? weights[place] : (mine.body.get(6)?.[0] ?? 0) - (mine.body.get(5)?.[0] ?? 0);
  if (windows !== receipt.windows) throw new Error(`the record says ${windows} windows`);
  return `the update is in ${said}, with ${windows} windows`;
}
