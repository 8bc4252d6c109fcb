"""Ranks that hold base, anchor and feedback in shares make the updates, states and files of one process, to the bit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from peer.durable import write_durably
from peer.training.offload import Offload
from peer.training.outer_state import OuterState
from peer.training.parallel.group import RankGroup
from peer.training.parallel.model import build_rank_model, make_mesh
from peer.training.parallel.outer_state import ShardedOuterState
from peer.training.parallel.parallel_dims import ParallelDims
from protocol.codec import make_codec
from protocol.codec.none import RawCodec
from protocol.errors import CodecError
from protocol.ids import PeerKey, sha256
from protocol.layout import REFERENCE_NORMS, Layout
from protocol.merkle import blob_digest
from protocol.model import build_model, model_layout, parameters_of, plain_config
from protocol.outer import Contribution
from protocol.reduce import Reduction
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import checkpoint_chunks, state_digest, state_layout, tensors_from_checkpoint
from protocol.untransmitted import untransmitted
from tests.support.long_cases import long_cases
from tests.support.parallel_world import join, run_ranks, write_json
from tests.support.specs import TINY_LLAMA

LAYOUTS = {2: ["dp=2", "fsdp=2", "tp=2", "pp=2"], 4: ["fsdp=2,tp=2", "dp=2,fsdp=2", "dp=2,tp=2", "pp=2,fsdp=2"]}
RUNS = {
    "dp=2": (CodecSpec(kind="none"), OuterSpec()),
    "fsdp=2": (CodecSpec(kind="int8"), OuterSpec(optimizer="nesterov", lr=0.7)),
    "tp=2": (CodecSpec(kind="sign"), OuterSpec()),
}
"""Codec and outer step of some; the others have these."""
USUAL = (CodecSpec(kind="sparse", k=64), OuterSpec(optimizer="nesterov", lr=0.7))
BETA = 0.9
KEYS = [PeerKey(sha256(bytes([n]))) for n in range(3)]
CPU = torch.device("cpu")
CONFIG = plain_config(TINY_LLAMA | {"intermediate_size": 200, "tie_word_embeddings": False})


def layout() -> Layout:
    return model_layout(build_model(CONFIG, device="meta"))


def noise(seed: int, of: Layout, scale: float = 0.01) -> dict[str, Tensor]:
    made = torch.Generator().manual_seed(seed)
    return {t.name: torch.randn(t.shape, generator=made) * scale for t in of.tensors}


def life(side, learn, digest, rubbish, folder: Path) -> list[str]:
    """Drive an outer side, and return the digests of all results. `folder`: of this process."""
    seen = []
    others = [Contribution(KEYS[1], 2, dense(10)), Contribution(KEYS[2], 5, dense(11))]
    for r in range(3):
        learn(100 + r)
        blob = side.announce()
        seen.append(blob_digest(blob).hex() if blob else "")
        learn(200 + r)  # goes on while the update travels
        mine = dense(r) if r else blob
        side.advance([others[0], Contribution(KEYS[0], 1, passed_on(mine)), others[1]])
        side.rebase()
        seen.append(digest())
        side.add_back(dense(20 + r))
        if r == 1:
            side.subtract(dense(20), BETA)
    sums = sums_of([*others, Contribution(KEYS[0], 1, dense(30))], side.spec, folder)
    side.advance_reduced(sums)
    side.rebase()
    seen.append(digest())
    assert _codec is not None
    if not _codec.sends_all:
        selection = untransmitted(dense(30), [p.read_bytes() for p in sums], Reduction(_codec))
        assert selection is not None
        side.add_back(dense(30), selection.to_bytes())
        side.add_back(dense(31), selection.to_bytes())
        side.subtract(dense(31), 0.5, selection.to_bytes())
    blob = side.announce()
    seen.append(blob_digest(blob).hex() if blob else "")
    side.take_back(dense(32))
    blob = side.announce()
    seen.append(blob_digest(blob).hex() if blob else "")
    # A replayable run, in which the feedback is scratch memory.
    side.replayable = True
    for own in (dense(40), None):
        learn(300)
        side.begin_again(own)
        for seed in (301, 302):
            learn(seed)
            blob = side.announce()
            seen.append(blob_digest(blob).hex() if blob else "")
            side.advance([others[0], Contribution(KEYS[0], 1, dense(41))])
            side.rebase()
        seen.append(digest())
    # An error on one rank is raised on all.
    if _codec.sends_all:
        sums[2].write_bytes(sums[2].read_bytes()[:-40] + (b"\xff" if isinstance(_codec, RawCodec) else b"\x80") * 40)
    with pytest.raises(CodecError):
        if _codec.sends_all:
            side.advance_reduced(sums)
        else:
            side.advance([others[0], Contribution(KEYS[0], 1, rubbish)])
    assert side.base is None
    return seen


def sums_of(contributions: list[Contribution], outer: OuterSpec, folder: Path) -> list[Path]:
    """Return the reduced shards of a round, as files."""
    assert _codec is not None
    folder.mkdir()
    paths = [folder / f"{part}" for part in range(3)]
    for part, path in enumerate(paths):
        path.write_bytes(Reduction(_codec).reduce(contributions, outer, 3, part))
    return paths


_codec = _passed = None


def dense(seed: int) -> bytes:
    """Another peer's update."""
    assert _codec is not None
    return bytes(_codec.encode(noise(seed, _codec.layout)))


def passed_on(blob: bytes | None) -> bytes:
    """Rank 0's blob: on all ranks, which read it from a file in a real trainer."""
    if _passed is None:
        assert blob is not None
        return blob
    if blob is not None:
        return _passed(blob)
    return _passed(b"")


def begin(name: str) -> tuple[CodecSpec, OuterSpec]:
    global _codec
    codec, outer = RUNS.get(name, USUAL)
    _codec = make_codec(codec, layout())
    return codec, outer


def genesis(path: Path, name: str) -> dict[str, Tensor]:
    outer = begin(name)[1]
    of = state_layout(layout(), outer)
    state = noise(1, of, 1.0)
    if not path.exists():
        write_durably(path, checkpoint_chunks(of, state))
    return state


def spoilt(codec) -> bytes:
    """Return a blob whose last block, which one rank owns, is invalid."""
    blob = bytearray(dense(3))
    blob[-codec.encoded_size(1) :] = b"\xff" * codec.encoded_size(1)
    blob[-40:] = b"\xff" * 40
    return bytes(blob)


def one_process(name: str, folder: Path) -> tuple[list[str], bytes]:
    global _passed
    _passed = None
    state = genesis(folder / f"genesis-{name}", name)
    _, outer = begin(name)
    of = layout()
    side = OuterState({t.name: torch.zeros(t.shape) for t in of.tensors}, _codec, BETA, outer, Offload(CPU))  # type: ignore[arg-type]
    side.base = state
    side.rebase()

    def learn(seed: int) -> None:
        for n, change in noise(seed, of).items():
            side.local[n].add_(change)

    last = b""

    def digest() -> str:
        nonlocal last
        assert side.base is not None
        last = b"".join(checkpoint_chunks(state_layout(of, outer), side.base))
        return state_digest(state_layout(of, outer), side.base).hex()

    return life(side, learn, digest, spoilt(_codec), folder / f"one-{name}"), last


def rank(me: int, world: int, folder: Path) -> None:
    global _passed
    for name in LAYOUTS[world]:
        degrees = ParallelDims.parse(name)
        join(me, world, folder / f"meet-{name}")
        group = RankGroup(degrees, me)
        built = build_rank_model(CONFIG, degrees, make_mesh(degrees, CPU), CPU)
        codec, outer = begin(name)
        assert _codec is not None
        # Offloaded or not: the one process beside is not.
        offload = Offload(CPU, enabled=True, folder=folder)
        share = ShardedOuterState(built, group, _codec, BETA, outer, TINY_LLAMA["num_hidden_layers"], offload)
        share.load(folder / f"genesis-{name}")
        share.rebase()

        def learn(seed: int, built=built) -> None:
            for n, change in noise(seed, _codec.layout).items():  # type: ignore[union-attr]
                if n in built.parameters:
                    built.local(n).add_(built.shard_of(n, change))

        def passed(blob: bytes) -> bytes:
            size = _codec.size  # type: ignore[union-attr]
            buffer = torch.frombuffer(bytearray(blob or size), dtype=torch.uint8)
            dist.broadcast(buffer, 0)
            return bytes(buffer.numpy().data)

        def digest(share=share, name=name) -> str:
            found = share.store(folder / f"last-{name}")
            again = share.store(None)
            assert found == again
            return found.hex() if found else ""

        _passed = passed
        seen = life(share, learn, digest, spoilt(_codec), folder / f"{name}-{me}")
        share.load(folder / f"last-{name}")  # after a failure all goes on
        share.rebase()
        if me == 0:
            write_json(folder / f"{name}.json", seen)
        group.leave()


@pytest.mark.parametrize("world", [2, *long_cases(4)])
def test_updates_states_and_checkpoints_are_those_of_one_process_after_every_round(world, tmp_path):
    expected = {name: one_process(name, tmp_path) for name in LAYOUTS[world]}
    run_ranks(world, f"{__name__}:rank", tmp_path)
    for name, (seen, last) in expected.items():
        assert json.loads((tmp_path / f"{name}.json").read_text()) == seen
        assert (tmp_path / f"last-{name}").read_bytes() == last


# -- memory --------------------------------------------------------------------------------------------------

LARGE = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 20, "num_attention_heads": 4,
                      "num_key_value_heads": 4, "vocab_size": 1024}  # fmt: skip
MIB = 2**20


def peak() -> int:
    """Bytes of memory that this process had at most since it was last asked."""
    status = Path("/proc/self/status").read_text()
    Path("/proc/self/clear_refs").write_text("5")
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")) * 1024


def large_rank(me: int, world: int, folder: Path) -> None:
    config = plain_config(LARGE)
    of = model_layout(build_model(config, device="meta"))
    found = {}
    for name in ("fsdp=4", "fsdp=2,tp=2"):
        join(me, world, folder / f"meet-{name}")
        degrees = ParallelDims.parse(name)
        group = RankGroup(degrees, me)
        codec = make_codec(CodecSpec(kind="sparse", k=64), of)
        dist.barrier()
        peak()
        before = peak()
        built = build_rank_model(config, degrees, make_mesh(degrees, CPU), CPU)
        share = ShardedOuterState(built, group, codec, 0.9, OuterSpec(), LARGE["num_hidden_layers"], Offload(CPU))
        share.load(folder / "genesis")
        share.rebase()
        for parameter in built.parameters:
            built.local(parameter).mul_(1.01)
        blob = share.announce()
        buffer = torch.frombuffer(bytearray(blob or codec.size), dtype=torch.uint8)
        dist.broadcast(buffer, 0)
        share.advance([Contribution(KEYS[0], 1, bytes(buffer.numpy().data))])
        share.rebase()
        share.store(folder / "state")
        found[name] = peak() - before
        del built, share
        group.leave()
    write_json(folder / f"{me}.json", found)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="no /proc/self/clear_refs: peaks are unknown")
@pytest.mark.long
def test_no_rank_ever_has_the_whole_model_in_memory(tmp_path):
    model = build_model(plain_config(LARGE))
    of = model_layout(model)
    states = state_layout(of, OuterSpec())
    tensors = parameters_of(model) | {REFERENCE_NORMS: torch.zeros(len(of.tensors))}
    write_durably(tmp_path / "genesis", checkpoint_chunks(states, tensors))
    assert tensors_from_checkpoint(states, (tmp_path / "genesis").read_bytes()).keys() == tensors.keys()
    run_ranks(4, f"{__name__}:large_rank", tmp_path)
    whole = 4 * of.numel
    assert whole > 80 * MIB
    for me in range(4):
        for name, size in json.loads((tmp_path / f"{me}.json").read_text()).items():
            # Four copies of a quarter each (model, base, anchor, feedback) and scratch; one process has 4 whole ones.
            assert size < 2.5 * whole, f"rank {me} of {name}: {size / MIB:.0f} MiB of {whole / MIB:.0f}"
            print(f"rank {me} of {name}: {size / MIB:.0f} MiB at most; the model has {whole / MIB:.0f}")
