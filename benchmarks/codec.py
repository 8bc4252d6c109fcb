"""The codecs: bits a parameter, speed beside memcpy and hivemind's 8-bit codecs, and their error with error feedback.

Speeds are GB/s of fp32 input, the best of several turns that all subjects take one after the other; ratios are to
memcpy in the same run. `apply` is one update's part in an outer step of several updates; for hivemind it is the mean of
decoded tensors, which checks nothing, clips nothing and promises no bits. Errors are relative (2-norm). `error` is
that of one update alone. `error_feedback` is that of the sum over all rounds with the codec's own error feedback
(hivemind has none): a constant signal of size 1 under fresh noise of size 1.

JSON keys:
  command, commit, date, machine, seeds: see benchmarks.report
  parameters, updates, rounds, device: the sizes
  clock: wall, or cpu (with --cpu-time: seconds that this process computed, over all threads)
  memcpy_gbps: copying fp32 to fp32
  subjects: a list, each with
    name; bits_per_parameter; bytes;
    encode_gbps, check_gbps, apply_gbps; encode_ratio, check_ratio, apply_ratio (to memcpy); null where there is none
    error; error_feedback
  small_model: what a round costs a peer of the demo's run (many small tensors, signs, 4 updates of 4 peers), in
    milliseconds of this process's CPU time, whatever the clock: codec; parameters; tensors; announce_ms (encode the own
    update); check_ms (the 3 others'); apply_ms (all 4); digest_ms (of the new state); total_ms; limit_ms
  goals: a list of goal, value, met
"""

from __future__ import annotations

import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks import report
from protocol.codec import make_codec
from protocol.errors import CairnError
from protocol.ids import PeerKey
from protocol.layout import Layout, is_outer_tensor
from protocol.outer import Contribution, apply
from protocol.spec import CodecSpec, OuterSpec
from protocol.state import state_digest, state_layout

GOAL_BITS = 0.165
OUTER = OuterSpec()
SMALL_MODEL_MS = 100.0
"""Maximum milliseconds of the small model's round: four peers share two cores, and all wait for the slowest."""


class Subject(ABC):
    """A codec under test, for vectors of `n` parameters."""

    name: str
    size: int

    @abstractmethod
    def encode(self, e: Tensor) -> object:
        """Compress e; with error feedback, leave there what was not sent."""

    @abstractmethod
    def decode(self, blob) -> Tensor:
        """Return the dense tensor."""

    @abstractmethod
    def apply(self, blobs: list) -> None:
        """Apply an outer step of these updates."""

    beta: float | None = None


class Cairn(Subject):
    """One of this project's codecs."""

    def __init__(self, spec: CodecSpec, n: int, device: str):
        self.spec = spec
        self.name = f"sparse, k = {spec.k}" if spec.kind == "sparse" else spec.kind
        self.layout = Layout.of({"w": (n,)})
        self.codec = make_codec(spec, self.layout)
        self.size, self.beta = self.codec.size, spec.beta
        self.state = {t.name: torch.zeros(t.shape, device=device) for t in state_layout(self.layout, OUTER).tensors}
        self.device = device

    def encode(self, e: Tensor) -> object:
        return self.codec.encode({"w": e})

    def check(self, blob) -> None:
        self.codec.check(blob)

    def decode(self, blob) -> Tensor:
        out = {"w": torch.zeros(self.layout.numel, device=self.device)}
        self.codec.add_to(blob, out)
        return out["w"]

    def apply(self, blobs: list) -> None:
        updates = [Contribution(PeerKey(bytes([i]) * 32), 1, blob) for i, blob in enumerate(blobs)]
        apply(self.state, updates, self.codec, OUTER)


class Hivemind(Subject):
    """One of hivemind's, as its averager uses them: serialised tensors, decoded and averaged. On the CPU only."""

    def __init__(self, name: str, compression: object, n: int):
        self.name, self.compression = f"hivemind {name}", compression
        self.state = torch.zeros(n)
        self.size = len(self._encode(torch.randn(n)).buffer)

    def _encode(self, e: Tensor):
        from hivemind.compression import serialize_torch_tensor

        return serialize_torch_tensor(e, self.compression)  # type: ignore[arg-type]

    def encode(self, e: Tensor) -> object:
        return self._encode(e)

    def decode(self, blob) -> Tensor:
        from hivemind.compression import deserialize_torch_tensor

        return deserialize_torch_tensor(blob)

    def apply(self, blobs: list) -> None:
        total = torch.zeros_like(self.state)
        for blob in blobs:
            total.add_(self.decode(blob), alpha=1 / len(blobs))
        self.state.sub_(total)


@dataclass
class Timing:
    """The best of each, in seconds."""

    encode: float = float("inf")
    check: float = float("inf")
    apply: float = float("inf")


def main(argv: list[str] | None = None) -> int:
    """Measure, print, save. Return 1 when a goal is missed."""
    parser = report.command_line(__doc__ or "", "codec")
    parser.add_argument("--device", default="cpu", help="where tensors lie (hivemind's codecs know the CPU only)")
    parser.add_argument("--threads", type=int, metavar="N", help="of torch; by default its own choice")
    parser.add_argument(
        "--cpu-time", action="store_true", help="count this process's CPU time: for a machine that others use too"
    )
    options = parser.parse_args(argv)
    now = time.process_time if options.cpu_time else time.perf_counter
    if options.threads:
        torch.set_num_threads(options.threads)
    n, updates, turns, rounds = (2**20, 4, 3, 20) if options.quick else (2**23, 4, 5, 60)
    subjects = subjects_for(n, options.device)
    results = report.provenance("codec", argv, seeds=[0]) | {
        "parameters": n,
        "updates": updates,
        "rounds": rounds,
        "device": options.device,
        "clock": "cpu" if options.cpu_time else "wall",
    }
    speed, copying = time_all(subjects, n, updates, turns, options.device, now)
    rows = []
    for subject in subjects:
        best = speed[subject.name]
        row = {"name": subject.name, "bits_per_parameter": 8 * subject.size / n, "bytes": subject.size}
        for what, seconds in (("encode", best.encode), ("check", best.check), ("apply", best.apply / updates)):
            known = seconds < float("inf")
            row[f"{what}_gbps"] = 4e-9 * n / seconds if known else None
            row[f"{what}_ratio"] = copying / seconds if known else None
        row["error"], row["error_feedback"] = errors(subject, n, rounds, options.device)
        rows.append(row)
    small = small_model(turns=8 if options.quick else 30)
    bits = rows[0]["bits_per_parameter"]
    results |= {
        "memcpy_gbps": 4e-9 * n / copying,
        "subjects": rows,
        "small_model": small,
        "goals": [
            report.goal(f"64 values of 4,096: at most {GOAL_BITS} bits a parameter", bits, bits <= GOAL_BITS),
            report.goal(
                f"a round of the small model: at most {SMALL_MODEL_MS:g} ms of a peer's CPU time",
                small["total_ms"],
                small["total_ms"] <= SMALL_MODEL_MS,
            ),
        ],
    }
    return report.ended(results, options, show(results))


def subjects_for(n: int, device: str) -> list[Subject]:
    """Everything that is compared; the codec with a goal comes first."""
    specs = [
        CodecSpec(kind="sparse", k=64),
        CodecSpec(kind="sparse", k=256),
        CodecSpec(kind="sparse", k=4096),
        CodecSpec(kind="sign"),
        CodecSpec(kind="int8"),
        CodecSpec(kind="none"),
    ]
    subjects: list[Subject] = [Cairn(spec, n, device) for spec in specs]
    try:
        from hivemind.proto.runtime_pb2 import CompressionType  # pyright: ignore[reportAttributeAccessIssue]
    except ImportError as e:
        print(f"hivemind's codecs are left out: {e}", file=sys.stderr)
        return subjects
    for name in ("UNIFORM_8BIT", "QUANTILE_8BIT", "FLOAT16"):
        subjects.append(Hivemind(name.lower().replace("_", " "), CompressionType.Value(name), n))
    return subjects


def time_all(
    subjects: list[Subject], n: int, updates: int, turns: int, device: str, now: Callable[[], float]
) -> tuple[dict[str, Timing], float]:
    """Return the best times of each subject, and of memcpy, in seconds.

    They take turns, so that all see the same machine.
    """
    best = {s.name: Timing() for s in subjects}
    source, target = torch.randn(n, device=device), torch.empty(n, device=device)
    copying = float("inf")
    for _ in range(turns):
        copying = min(copying, clock(lambda: target.copy_(source), device, now))
        for s in subjects:
            where = "cpu" if isinstance(s, Hivemind) else device
            e = source.to(where, copy=True)
            blobs: list = []
            timing = best[s.name]
            timing.encode = min(timing.encode, clock(lambda s=s, e=e, b=blobs: b.append(s.encode(e)), where, now))
            if isinstance(s, Cairn):
                timing.check = min(timing.check, clock(lambda s=s, b=blobs: s.check(b[0]), "cpu", now))
            many = blobs * updates
            timing.apply = min(timing.apply, clock(lambda s=s, m=many: s.apply(m), where, now))
    return best, copying


def clock(f: Callable[[], object], device: str, now: Callable[[], float]) -> float:
    """Seconds that f takes."""
    if device != "cpu":
        torch.cuda.synchronize()
    start = now()
    f()
    if device != "cpu":
        torch.cuda.synchronize()
    return now() - start


def small_llama() -> Layout:
    """Return the tensors of the demo's model, a Llama of 1.1 million parameters."""
    hidden, inner, vocabulary = 192, 512, 1024
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
    }
    for layer in range(2):
        here = f"model.layers.{layer}."
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{here}{norm}.weight"] = (hidden,)
        for matrix in "qkvo":
            shapes[f"{here}self_attn.{matrix}_proj.weight"] = (hidden, hidden)
        for matrix in ("gate", "up"):
            shapes[f"{here}mlp.{matrix}_proj.weight"] = (inner, hidden)
        shapes[f"{here}mlp.down_proj.weight"] = (hidden, inner)
    return Layout.of(shapes)


SMALL_CODEC = CodecSpec(kind="sign")
"""The demo's."""


def small_model(turns: int) -> dict:
    """Milliseconds of CPU time, the least of several turns, for each thing that a peer does in a round; one thread."""
    layout, peers = small_llama(), 4
    codec, outer = make_codec(SMALL_CODEC, layout), OuterSpec(lr=1.4)
    states = state_layout(layout, outer)
    generator = torch.Generator().manual_seed(0)

    def noise() -> dict[str, Tensor]:
        return {t.name: torch.randn(t.shape, generator=generator) for t in layout.tensors}

    state = noise() | {t.name: torch.zeros(t.shape) for t in states.tensors if is_outer_tensor(t.name)}
    others = [codec.encode(noise()) for _ in range(peers - 1)]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    best: dict[str, float] = dict.fromkeys(("announce_ms", "check_ms", "apply_ms", "digest_ms"), float("inf"))
    try:
        for _ in range(turns):
            feedback, own = noise(), []
            work: dict[str, Callable[[], object]] = {
                "announce_ms": lambda e=feedback, own=own: own.append(codec.encode(e)),
                "check_ms": lambda: [codec.check(blob) for blob in others],
                "apply_ms": lambda own=own: apply(
                    state,
                    [Contribution(PeerKey(bytes([i]) * 32), 1, blob) for i, blob in enumerate(own + others)],
                    codec,
                    outer,
                ),
                "digest_ms": lambda: state_digest(states, state, 1),
            }
            for what, f in work.items():
                best[what] = min(best[what], 1e3 * clock(f, "cpu", time.process_time))
    finally:
        torch.set_num_threads(threads)
    sizes = {"codec": SMALL_CODEC.kind, "parameters": layout.numel, "tensors": len(layout.tensors)}
    return sizes | best | {"total_ms": sum(best.values()), "limit_ms": SMALL_MODEL_MS}


def errors(subject: Subject, n: int, rounds: int, device: str) -> tuple[float, float]:
    """Return the relative error of one update, and of `rounds` updates together with error feedback."""
    n = min(n, 2**17)
    device = "cpu" if isinstance(subject, Hivemind) else device
    small = Cairn(subject.spec, n, device) if isinstance(subject, Cairn) else subject
    generator = torch.Generator().manual_seed(0)
    # Gradients have heavier tails than a normal distribution: a product of two normals.
    pull = (torch.randn(n, generator=generator) * torch.randn(n, generator=generator)).to(device)
    one = float((small.decode(small.encode(pull.clone())) - pull).norm() / pull.norm())
    wanted, got, e = torch.zeros_like(pull), torch.zeros_like(pull), torch.zeros_like(pull)
    for _ in range(rounds):
        g = pull + torch.randn(n, generator=generator).to(device)
        wanted += g
        e = g if small.beta is None else e * small.beta + g
        got += small.decode(small.encode(e))
    return one, float((got - wanted).norm() / wanted.norm())


def show(results: dict) -> str:
    """Return the results as tables."""
    m = results["machine"]
    sizes = (
        f"{results['parameters']:,} parameters, {results['updates']} updates a step, {m['threads']} threads on "
        f"{m['cores']} cores at load {m['load']}, torch {m['torch']}, {results['device']}, {results['clock']} time"
    )
    columns = ["codec", "bits/param", "encode GB/s", "of memcpy", "check GB/s", "of memcpy", "apply GB/s", "of memcpy"]
    rows: list[list[object]] = [
        ["memcpy (floor)", 32.0, results["memcpy_gbps"], 1.0, None, None, None, None, None, None]
    ]
    for s in results["subjects"]:
        speeds = [s[f"{what}_{unit}"] for what in ("encode", "check", "apply") for unit in ("gbps", "ratio")]
        rows.append([s["name"], s["bits_per_parameter"], *speeds, s["error"], s["error_feedback"]])
    codecs = report.table([*columns, "error", "with feedback"], rows)
    small = results["small_model"]
    about = (
        f"A round of a small model ({small['parameters']:,} parameters in {small['tensors']} tensors, "
        f"{small.get('codec', 'sparse, k = 256')}), "  # older files do not name it
        "ms of one peer's CPU time, of 4 peers"
    )
    parts = {"announce_ms": "announce", "check_ms": "check the others' 3", "apply_ms": "apply 4", "digest_ms": "digest"}
    rows = [[name, small[key]] for key, name in parts.items()]
    parts_table = report.table(["what", "ms"], [*rows, ["all", small["total_ms"]]])
    return "\n\n".join([sizes, codecs, about, parts_table])


if __name__ == "__main__":
    try:
        sys.exit(main())
    except CairnError as e:
        sys.exit(f"benchmarks.codec: {e}")
