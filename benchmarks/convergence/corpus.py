"""The shipped corpus as tokens: prepared once by Cairn's own `prepare`, and cut by president for non-IID peers."""

from __future__ import annotations

import json
import lzma
from collections import defaultdict
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from coordinator.authoring.prepare import Prepared, prepare

ROOT = Path(__file__).resolve().parents[2]
ADDRESSES = ROOT / "examples" / "sotu" / "addresses.jsonl.xz"
FOLDER = ROOT / "build" / "convergence"
HELD_OUT_EVERY = 12


@dataclass(frozen=True)
class Corpus:
    """Tokens, each array 1-d. `presidents`: the training tokens of the presidents who said most, longest first."""

    train: np.ndarray
    validation: np.ndarray
    presidents: tuple[np.ndarray, ...]
    prepared: Prepared


@lru_cache
def corpus(vocabulary: int, window: int, folder: Path = FOLDER) -> Corpus:
    """Return the State of the Union addresses in a byte-level BPE; every twelfth address is held out."""
    prepared = prepare(
        [str(ADDRESSES)], folder / f"sotu-{vocabulary}", vocabulary=vocabulary, validation_every=HELD_OUT_EVERY
    )
    manifest = prepared.manifest
    train, validation = (_tokens(prepared, part.shards) for part in (manifest.train, manifest.validation))
    return Corpus(train, validation, _by_president(train, manifest.end_of_text_id, window), prepared)


def _tokens(prepared: Prepared, shards) -> np.ndarray:
    dtype = np.dtype(prepared.manifest.dtype).newbyteorder("<")
    return np.concatenate([np.fromfile(prepared.folder / f"{s.digest}.tokens", dtype=dtype) for s in shards])


def _by_president(train: np.ndarray, end: int, window: int) -> tuple[np.ndarray, ...]:
    """Return the training tokens by their speaker. Documents keep the order of the file; each ends with `end`."""
    with lzma.open(ADDRESSES, "rt") as file:
        names = [json.loads(line)["president"] for line in file]
    spoken = [n for i, n in enumerate(names) if i % HELD_OUT_EVERY != HELD_OUT_EVERY - 1]
    documents = np.split(train, np.flatnonzero(train == end) + 1)[:-1]
    if len(documents) != len(spoken):
        raise ValueError(f"{len(documents)} documents were prepared of {len(spoken)} addresses")
    by_name: dict[str, list[np.ndarray]] = defaultdict(list)
    for name, document in zip(spoken, documents, strict=True):
        by_name[name].append(document)
    joined = sorted((np.concatenate(d) for d in by_name.values()), key=len, reverse=True)
    return tuple(d for d in joined if len(d) > 100 * window)
