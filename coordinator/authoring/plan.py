"""The plan of a run: from model, peers and links to the fields of run.toml and their costs. A pure function.

Among the measured settings (codec, H), the plan takes the one with the least loss whose exchange fits into a given
share of a round's training. The loss includes the cost of training on during the exchange. Sizes are the codec's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from coordinator.authoring import measurements
from coordinator.authoring.errors import AuthoringError
from coordinator.authoring.measurements import Choice, MeasuredSetting
from protocol.codec import make_codec
from protocol.layout import BLOCK, MAX_NUMEL, Layout
from protocol.ledger.credits import CreditRule
from protocol.messages import MAX_CONTRIBUTORS
from protocol.spec import CodecSpec, CreditSpec, OuterSpec, RoundSpec

BF16 = 2
"""Bytes of one gradient value in data-parallel training."""
ASSUMED_FLOPS = 100e12
"""FLOP/s of a volunteer's GPU, if the owner does not state its speed."""
ASSUMED_UTILISATION = 0.4
TOKENS_PER_PARAMETER = 20
"""Hoffmann et al. 2022 (arXiv 2203.15556)."""
FINE_TUNING_TOKENS = 100_000_000
"""Default tokens of a run that continues from trained weights."""
MOST_BATCH = 64
LEAST_STEPS = 4000
"""The default batch is MOST_BATCH windows a peer, halved until the run has LEAST_STEPS inner steps.

Large batches save exchanges; too large ones waste tokens."""
FEW_ROUNDS = 50
MAX_TOKENS = 10**14
"""Maximum tokens of a run: twice the largest round still fits into a spec's integers."""
WEEK = 7 * 86_400
"""Seconds of a week, the longest timer that a spec may hold."""


class PlanError(AuthoringError):
    """Invalid inputs. `field` is the name of the input, `reason` the requirement."""

    def __init__(self, field: str, reason: str):
        super().__init__(f"{field.replace('_', ' ')}: {reason}")
        self.field = field
        self.reason = reason


@dataclass(frozen=True)
class PlanInputs:
    """The owner's knowledge of model, peers and links. The properties derive the inputs that are None."""

    model: Layout | int
    """The layout of what is trained, or only its number of parameters; its blocks are then assumed to be full."""
    frozen: int = 0
    """Parameters of a frozen base, under an adapter that is trained."""
    frozen_bytes: int = 0
    """Bytes of that base on a peer's GPU."""
    peers: int = 16
    uplink: float = 100.0
    """Mbit/s that a typical volunteer sends."""
    downlink: float | None = None
    """Mbit/s that a typical volunteer receives; None means the uplink's rate."""
    rtt: float = 100.0
    """Milliseconds of the round trip between two volunteers."""
    tokens_per_second: float | None = None
    """Tokens a second of one peer."""
    window: int = 2048
    batch: int | None = None
    """Windows in an inner step of one peer."""
    total_tokens: int | None = None
    share: float = 0.5
    """Maximum duration of an exchange, as a share of a round's training time, if nothing overlapped."""
    relays: bool = False
    """Well-connected members pass updates on, so that a peer sends its own about once."""
    conversations: bool = False
    """The run teaches a trained model from conversations."""

    def __post_init__(self):
        _within("parameters", self.parameters, 1, MAX_NUMEL)
        _within("peers", self.peers, 2, MAX_CONTRIBUTORS)
        _within("uplink", self.uplink, 0.001, 1e6, " Mbit/s")
        if self.downlink is not None:
            _within("downlink", self.downlink, 0.001, 1e6, " Mbit/s")
        _within("rtt", self.rtt, 0, 10_000, " ms")
        if self.tokens_per_second is not None:
            _within("tokens_per_second", self.tokens_per_second, 0.01, 1e12)
        _within("window", self.window, 8, 2**20, " tokens")
        if self.batch is not None:
            _within("batch", self.batch, 1, 65_536, " windows")
        _within("total_tokens", self.total, 1, MAX_TOKENS)
        _within("share", self.share, 0.0001, 1)

    @property
    def parameters(self) -> int:
        return self.model if isinstance(self.model, int) else self.model.numel

    @property
    def total(self) -> int:
        """Tokens of the run; by default 20 a parameter, and FINE_TUNING_TOKENS on a frozen base."""
        if self.total_tokens is not None:
            return self.total_tokens
        return FINE_TUNING_TOKENS if self.frozen else TOKENS_PER_PARAMETER * self.parameters

    @property
    def speed(self) -> float:
        """Tokens a second of one peer; by default those of the assumed GPU at the assumed utilisation."""
        per_parameter = CreditSpec().flops_per_parameter_token
        flops = CreditRule(per_parameter, self.parameters, self.window, frozen_parameters=self.frozen).flops_per_token
        return ASSUMED_UTILISATION * ASSUMED_FLOPS / flops if self.tokens_per_second is None else self.tokens_per_second

    @property
    def windows(self) -> int:
        """Windows in an inner step of one peer; by default MOST_BATCH, halved until there are LEAST_STEPS steps."""
        if self.batch is not None:
            return self.batch
        batch = MOST_BATCH
        while batch > 1 and LEAST_STEPS * batch * self.window * self.peers > self.total:
            batch //= 2
        return batch

    @property
    def step_tokens(self) -> int:
        """Tokens of one inner step of all peers together: the global batch."""
        return self.windows * self.window * self.peers

    @property
    def copies(self) -> int:
        """Number of times that a peer sends its update."""
        return 1 if self.relays else self.peers - 1

    @cached_property
    def layout(self) -> Layout:
        """The model's layout, or one tensor of full blocks with at least as many parameters."""
        if isinstance(self.model, Layout):
            return self.model
        blocks = -(-self.model // BLOCK)
        return Layout.of({"parameters": (min(blocks * BLOCK, MAX_NUMEL),)})

    def training_seconds(self, inner_steps: int) -> float:
        """Return the seconds of a round's training."""
        return inner_steps * self.windows * self.window / self.speed

    def update_bytes(self, codec: CodecSpec) -> int:
        """Return the exact size of an update on the wire."""
        return make_codec(codec, self.layout).size

    def exchange_seconds(self, update_bytes: int) -> float:
        """Return the seconds until all have all updates: the slower of sending and receiving, and two round trips."""
        up = self.copies * update_bytes / self.uplink
        down = (self.peers - 1) * update_bytes / (self.downlink or self.uplink)
        return 8e-6 * max(up, down) + 2 * self.rtt / 1000


@dataclass(frozen=True)
class Cost:
    """A measured setting with its costs for the given inputs."""

    setting: MeasuredSetting
    update_bytes: int
    training_seconds: float
    exchange_seconds: float
    uplink_needed: float
    """Mbit/s from which the exchange fits into the share; infinite if no uplink is enough."""

    @property
    def share(self) -> float:
        """Duration of the exchange as a share of the round's training time, if nothing overlapped."""
        return self.exchange_seconds / self.training_seconds

    @property
    def loss(self) -> float:
        """The setting's loss, with the increase from training on during the exchange."""
        return self.setting.loss * (1 + measurements.OVERLAP_LOSS * self.share)


@dataclass(frozen=True)
class Remedies:
    """Changes that would make the cheapest measured setting fit if none does. Each alone is enough."""

    inner_steps: int | None
    """H with the plan's codec, beyond the measured values; None if no H is enough in a run of FEW_ROUNDS rounds."""
    share: float | None
    """Share of the training time; None if the exchange takes longer than the training."""
    uplink: float
    """Mbit/s; infinite if no uplink is enough."""
    peers: int | None
    """Maximum number of peers; None if two are too many."""


@dataclass(frozen=True)
class RunPlan:
    """The recommended fields, and their costs."""

    inputs: PlanInputs
    cost: Cost
    fits: bool
    """False if no measured setting fits; the plan then has the one whose exchange takes the least share."""
    remedies: Remedies | None
    """The remedies if the setting does not fit, else None."""
    target_tokens: int
    rounds: int
    timers: dict[str, int]
    """Fields of [round], in seconds. They are for faults: a healthy round does not wait for any of them."""
    max_members: int
    lr: float
    warmup_tokens: int
    better: Cost | None
    """The setting with less loss that needs the least uplink; None if there is none."""
    most_peers: int | None
    """Maximum number of peers with which the setting fits; None if it does not fit now."""
    cautions: tuple[str, ...]

    @property
    def setting(self) -> MeasuredSetting:
        return self.cost.setting

    @property
    def inner(self) -> Choice:
        """The inner optimizer."""
        return measurements.ADAPTER_INNER if self.inputs.frozen else measurements.INNER

    @property
    def outer(self) -> OuterSpec:
        """The outer step to write. With signs it may be another than the setting was measured with."""
        if self.setting.codec.kind != "sign":
            return self.setting.outer
        fine_tuning = self.inputs.frozen or self.inputs.conversations
        return measurements.PLAIN if fine_tuning else measurements.NESTEROV

    @property
    def final_loss(self) -> str:
        """The final loss in words, as it was measured and with the cost of training on, which is computed."""
        beyond = ", beyond what was measured" if self.cost.share > measurements.OVERLAP_MEASURED else ""
        return (
            f"{self.setting.loss:g} x data-parallel's as measured, {self.cost.loss:.4g} x with training on during the "
            f"exchange (by calculation{beyond})"
        )

    @property
    def source(self) -> str:
        """The page that has the setting's loss, and the outer step of that loss if it is not the plan's."""
        measured = self.setting.outer
        if measured == self.outer:
            return measurements.SOURCE
        momentum = f" and momentum {measured.momentum:g}" if measured.optimizer == "nesterov" else ""
        return f"{measurements.SOURCE}, with outer rate {measured.lr:g}{momentum}"

    @property
    def up_bytes(self) -> int:
        """Bytes that one peer sends in a round."""
        return self.inputs.copies * self.cost.update_bytes

    @property
    def down_bytes(self) -> int:
        """Bytes that one peer receives in a round."""
        return (self.inputs.peers - 1) * self.cost.update_bytes

    @property
    def data_parallel_bytes(self) -> int:
        """Bytes that one peer would send in the run with a ring all-reduce of bf16 gradients after each step."""
        n = self.inputs.peers
        return self.inputs.total // self.inputs.step_tokens * 2 * (n - 1) * BF16 * self.inputs.parameters // n

    @property
    def days(self) -> float:
        """Days of the whole run. Training continues during the exchange, so the longer of the two counts."""
        return self.rounds * max(self.cost.training_seconds, self.cost.exchange_seconds) / 86_400


def plan(inputs: PlanInputs, measured: Sequence[MeasuredSetting] = measurements.MEASURED) -> RunPlan:
    """Plan a run with the best measured setting that fits, or the cheapest if none does. Raises PlanError."""
    costs = [_cost(inputs, m) for m in measured]
    fitting = [c for c in costs if c.share <= inputs.share]
    q = inputs
    # Of equal settings the one with fewer bytes a token is better, whatever the links.
    best = min(fitting, key=lambda c: (c.loss, c.update_bytes / c.setting.inner_steps), default=None)
    best = best or min(costs, key=lambda c: c.share)
    if (refusal := _refusal(q, best)) is not None:
        raise refusal
    setting = best.setting
    target = setting.inner_steps * q.step_tokens
    slower = (c for c in costs if c.setting.loss < setting.loss and c not in fitting and c.uplink_needed < math.inf)
    better = [c for c in slower if _refusal(q, c) is None]
    rounds = -(-q.total // target)
    return RunPlan(
        inputs=q,
        cost=best,
        fits=bool(fitting),
        remedies=None if fitting else _remedies(q, best),
        target_tokens=target,
        rounds=rounds,
        timers=_timers(q, best),
        max_members=max(RoundSpec.model_fields["max_members"].default, min(MAX_CONTRIBUTORS, 2 * q.peers)),
        lr=_lr(q.frozen, measurements.ADAPTER_LR_AT) if q.frozen else _lr(q.parameters, measurements.LR_AT),
        warmup_tokens=round(measurements.WARMUP * q.total),
        better=min(better, key=lambda c: (c.uplink_needed, c.setting.loss), default=None),
        most_peers=_most_peers(q, best) if fitting else None,
        cautions=tuple(_cautions(q, best, rounds)),
    )


def _refusal(q: PlanInputs, c: Cost) -> PlanError | None:
    """Return the reason why a run cannot have such rounds with any links; None if it can."""
    steps, target = c.setting.inner_steps, c.setting.inner_steps * q.step_tokens
    if target > q.total:
        return PlanError(
            "total_tokens" if q.total_tokens is not None or q.batch is None else "batch",
            f"one round of {steps} inner steps has {target:,} tokens, more than the run's {q.total:,}: take fewer "
            "peers, smaller batches or windows, or more tokens",
        )
    if c.training_seconds * 3 > WEEK:
        return PlanError(
            "tokens_per_second",
            f"a round of {steps} inner steps would take {c.training_seconds / 86_400:.1f} days, and its timers end at "
            "7: take a smaller --batch or faster peers",
        )
    return None


def _cost(q: PlanInputs, setting: MeasuredSetting) -> Cost:
    size, training = q.update_bytes(setting.codec), q.training_seconds(setting.inner_steps)
    return Cost(
        setting=setting,
        update_bytes=size,
        training_seconds=training,
        exchange_seconds=q.exchange_seconds(size),
        uplink_needed=_uplink_needed(q, size, q.share * training),
    )


def _uplink_needed(q: PlanInputs, size: int, allowed: float) -> float:
    """Return the Mbit/s at which an exchange of updates of `size` bytes takes `allowed` seconds."""
    left = allowed - 2 * q.rtt / 1000
    if left <= 0:
        return math.inf
    down = 8e-6 * (q.peers - 1) * size / left
    if q.downlink is None:
        return down  # never less than what sending needs
    return 8e-6 * q.copies * size / left if down <= q.downlink else math.inf


def _remedies(q: PlanInputs, cheapest: Cost) -> Remedies:
    inner_steps = math.ceil(cheapest.exchange_seconds / (q.share * q.training_seconds(1)))
    return Remedies(
        inner_steps=inner_steps if inner_steps * q.step_tokens * FEW_ROUNDS <= q.total else None,
        share=math.ceil(1000 * cheapest.share) / 1000 if cheapest.share <= 1 else None,
        uplink=cheapest.uplink_needed,
        peers=_most_peers(q, cheapest),
    )


def _most_peers(q: PlanInputs, cost: Cost) -> int | None:
    """Return the maximum number of peers, of the same batch each, whose exchange fits; None if two do not fit."""
    left = q.share * cost.training_seconds - 2 * q.rtt / 1000
    if left <= 0:
        return None
    allowed = left / (8e-6 * cost.update_bytes)  # updates, over a link of 1 Mbit/s
    if q.relays and allowed * q.uplink < 1:
        return None
    link = q.downlink or q.uplink if q.relays else min(q.uplink, q.downlink or q.uplink)
    most = min(1 + math.floor(allowed * link), MAX_CONTRIBUTORS)
    return most if most >= 2 else None


def _timers(q: PlanInputs, cost: Cost) -> dict[str, int]:
    """Return timers for volunteers several times slower than the typical one, at least the spec's defaults."""
    least = {name: field.default for name, field in RoundSpec.model_fields.items()}
    exchange = _seconds(max(least["exchange_seconds"], 4 * cost.exchange_seconds))
    return {
        "max_seconds": _seconds(max(least["max_seconds"], 3 * cost.training_seconds)),
        "exchange_seconds": exchange,
        "propose_seconds": _seconds(max(least["propose_seconds"], 20 * q.rtt / 1000)),
        "patience_seconds": _seconds(max(least["patience_seconds"], 2 * exchange)),
    }


def _seconds(least: float) -> int:
    """Return seconds, rounded up to two digits, at most a week."""
    step = 10 ** max(0, math.floor(math.log10(least)) - 1)
    return min(WEEK, math.ceil(least / step) * step)


def _lr(parameters: int, measured: tuple[int, float]) -> float:
    """Return the first peak rate of a search, with two digits, from that of a measured number of parameters."""
    at, lr = measured
    return float(f"{min(2e-2, max(1e-5, lr * (parameters / at) ** measurements.LR_POWER)):.1e}")


def rounds_caution(rounds: int) -> str:
    """Return a warning if a run has few rounds, else ""."""
    if rounds >= FEW_ROUNDS:
        return ""
    return (
        f"only {rounds} rounds: the fewer, the less peers learn from each other ({measurements.FINE_TUNING}); take "
        "more tokens or smaller rounds (fewer peers, a smaller batch)"
    )


def _cautions(q: PlanInputs, cost: Cost, rounds: int) -> Iterator[str]:
    """Yield warnings about this plan, one sentence each."""
    if cost.exchange_seconds > cost.training_seconds:
        yield "an exchange takes longer than a round's training: the links, not the GPUs, set the pace"
    if caution := rounds_caution(rounds):
        yield caution
    if q.tokens_per_second is None and q.parameters + q.frozen < 100_000_000:
        yield (
            f"so small a model does not keep a GPU at {ASSUMED_UTILISATION:.0%}: measure, and give a peer's speed to "
            "`cairn run plan`"
        )
    if q.relays and q.downlink is None:
        yield "relays relieve the uplink only: the downlink, assumed to be no faster, still sets the time"
    if q.frozen:
        yield f"the planned loss is of a whole model that begins untrained: of adapters see {measurements.FINE_TUNING}"
    elif q.parameters > 10 * measurements.LARGEST_MEASURED:
        yield (
            f"losses were measured on models of up to {measurements.LARGEST_MEASURED / 1e6:.2g} million parameters: "
            "on yours expect their order rather than their size"
        )
    if q.peers > measurements.MEASURED_PEERS:
        yield (
            f"losses were measured with {measurements.MEASURED_PEERS} peers: expect higher ones with {q.peers}, since "
            f"{measurements.MORE_PEERS}"
        )


def _within(field: str, value: float, least: float, most: float, unit: str = "") -> None:
    """Raise PlanError unless the value is in the range; NaN is not."""
    if not least <= value <= most:
        raise PlanError(field, f"{value:,g}{unit} will not do: give from {least:,g} to {most:,g}{unit}")
