"""The checks of speed: does a step end within a round, what does the work earn, and what does it transfer? Pure.

A round of training ends when the swarm has trained the run's target of tokens, and at `max_seconds`. So its length
depends on the members that are there now. All figures are for these, and by the spec: the owner may change a round by a
directive.
"""

from __future__ import annotations

from dataclasses import dataclass

from peer.doctor.findings import DoctorFinding
from peer.doctor.measurements import DownloadProbe, PresentSwarm, Trial, step_seconds
from peer.training.sources import CACHE_BYTES
from protocol.data_address import public_url
from protocol.ledger.credits import CreditRule
from protocol.merkle import CHUNK
from protocol.reduce_plan import ReducePlan
from protocol.spec import RunSpec
from protocol.units import byte_size

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class TrainingPace:
    """The part of this machine in a round of the run.

    `round_seconds`: the training of a round, with this machine. `windows`: those that it trains meanwhile, as far as an
    update may claim them. `busy`: the share of the time in which it may train.
    """

    step_seconds: float
    tokens_per_second: float
    round_seconds: float
    windows: float
    busy: float

    @property
    def windows_an_hour(self) -> float:
        return self.windows * HOUR / self.round_seconds


def round_seconds(spec: RunSpec, tokens_per_second: float) -> float:
    """Return the seconds of a round's training, if all members together train this many tokens a second."""
    most = spec.round.max_seconds
    return min(most, spec.round.target_tokens / tokens_per_second) if tokens_per_second > 0 else most


def pace_of(spec: RunSpec, swarm: PresentSwarm, trial: Trial) -> TrainingPace | None:
    """Return this machine's pace; None when no step was measured."""
    seconds = step_seconds(trial.samples, spec.inner.batch)
    if seconds is None:
        return None
    speed = spec.inner.batch * spec.data.window_tokens / seconds
    length = round_seconds(spec, swarm.tokens_per_second + speed)
    trained = speed * length / spec.data.window_tokens
    windows = min(trained, float(spec.max_update_windows))
    return TrainingPace(seconds, speed, length, windows, windows / trained)


def step_finding(spec: RunSpec, trial: Trial, pace: TrainingPace | None) -> DoctorFinding | None:
    """Judge the time of a step against the time of a round; None when there is no device."""
    if trial.device is None:
        return None
    batch, limit = spec.inner.batch, spec.round.max_seconds
    step = f"a step of {batch} x {spec.data.window} tokens"
    if trial.refused:
        return DoctorFinding("step", "no", trial.refused)
    if pace is None:
        if not trial.waited:
            return DoctorFinding("step", "note", "not measured: the model does not fit into the memory")
        is_lost = spec.audit.replayable and trial.waited * batch / trial.device.ranks > limit
        return DoctorFinding(
            "step", "no" if is_lost else "warning", f"not one of the {batch} windows of a step was trained in "
            f"{trial.waited:.0f} s; a round ends after {limit:.0f} s at most", "use a faster device",
        )  # fmt: skip
    plain = ", without torch.compile" if trial.device.kind == "cuda" else ""
    takes = f"{step} takes {_number(pace.step_seconds)} s ({pace.tokens_per_second:,.0f} tokens/s{plain})"
    length = f"{_number(pace.round_seconds)} s"
    if pace.step_seconds > limit and spec.audit.replayable:
        found = f"{takes}; a round ends after {limit:.0f} s at most, and this run drops a step that is under way then"
        return DoctorFinding("step", "no", found, "use a faster device: this one would never contribute")
    if pace.step_seconds > pace.round_seconds:
        found = f"{takes}; a round trains for about {length} now"
        if spec.audit.replayable:
            remedy = "use a faster device: this run drops a step that is under way when a round ends"
        else:
            one_of = pace.step_seconds / pace.round_seconds
            remedy = f"its work counts in one round of {one_of:.0f}; a faster device does more"
        return DoctorFinding("step", "warning", found, remedy)
    steps = round(pace.windows / batch)
    found = f"{takes}; a round trains for about {length}: {steps:,} {'step' if steps == 1 else 'steps'} here"
    if pace.busy < 0.9:
        remedy = (
            f"an update may claim {spec.round.max_update_tokens:,} tokens, so this machine would train for "
            f"{pace.busy:.0%} of the time: a slower one earns as much, and the owner can raise round.max_update_tokens"
        )
        return DoctorFinding("step", "warning", found, remedy)
    return DoctorFinding("step", "ok", found)


def micro_credits_an_hour(spec: RunSpec, pace: TrainingPace) -> int:
    """Return the micro-credits of an hour in which every update is accepted and counts in full."""
    return CreditRule.of(spec).micro_credits(int(pace.windows_an_hour))


def credit_finding(spec: RunSpec, pace: TrainingPace) -> DoctorFinding:
    """Tell what the work earns."""
    credits = micro_credits_an_hour(spec, pace) / 1e6
    hour, day = ("less than 0.01" if n < 0.01 else f"about {_number(n)}" for n in (credits, 24 * credits))
    found = (
        f"{hour} an hour, {day} a day, if every update is accepted and counts in full (the first of a new key count "
        "for less). A credit is 10^15 FLOPs of accepted training: a record of work, no money"
    )
    return DoctorFinding("credits", "note", found)


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes that this machine transfers with the `members` of now, or with one when nobody is there.

    `first`: once, before training. `exchange`: in a round each way, since members pass updates on and so give on
    average as much as they get. `data_an_hour`: at most, of training data that is read at addresses while it trains.
    """

    members: int
    first: int
    exchange: int
    rounds_an_hour: float
    data_an_hour: float
    mbits: float
    """Mbit/s each way, with which an exchange is over before the others go on without it, and before the next."""

    @property
    def in_an_hour(self) -> float:
        return self.exchange * self.rounds_an_hour + self.data_an_hour

    @property
    def out_an_hour(self) -> float:
        return self.exchange * self.rounds_an_hour


def traffic_of(
    spec: RunSpec, swarm: PresentSwarm, pace: TrainingPace | None, first: int, *, private_data: bool
) -> Traffic:
    """Return the bytes to transfer. `first`: those of data and state that members give before training."""
    others, plan = max(1, swarm.members), ReducePlan.of(spec)
    exchange = others * plan.update_size
    if plan.is_reduced(others + 1):
        exchange = plan.committee * plan.update_size + plan.mean_size
    length = round_seconds(spec, swarm.tokens_per_second) if pace is None else pace.round_seconds
    size = sum(shard.size for shard in spec.data.train)
    streamed = any(private_data or public_url(address) for address in spec.data.addresses)
    data = 0.0
    if streamed and size <= CACHE_BYTES:
        first += size
    elif streamed and pace is not None:
        # Windows are drawn at random, and a chunk is the least that can be checked.
        width = {"uint16": 2, "uint32": 4}[spec.data.dtype]
        data = pace.windows_an_hour * (CHUNK + width * spec.data.window)
    mbits = 8e-6 * exchange / min(spec.round.exchange_seconds, length)
    return Traffic(swarm.members, first, exchange, HOUR / length, data, mbits)


def traffic_finding(traffic: Traffic) -> DoctorFinding:
    """Tell what the run transfers."""
    t = traffic
    members = "one other member" if t.members < 2 else f"{t.members} other members"
    members += "" if t.members else " (nobody is there now)"
    data = f" (up to {byte_size(t.data_an_hour)} of it training data)" if t.data_an_hour else ""
    found = (
        f"at first {byte_size(t.first)} in; then in a round {byte_size(t.exchange)} in and about as much out, with "
        f"{members}. An hour {byte_size(t.in_an_hour)} in{data} and {byte_size(t.out_an_hour)} out, "
        f"a day {byte_size(24 * t.in_an_hour)} in and {byte_size(24 * t.out_an_hour)} out"
    )
    return DoctorFinding("traffic", "note", found)


def link_finding(traffic: Traffic, download: DownloadProbe | None) -> DoctorFinding:
    """Judge the download against what an exchange needs. The upload has no judge: nobody takes a test upload."""
    need = f"an exchange needs {_number(traffic.mbits)} Mbit/s each way"
    if download is None:
        return DoctorFinding("link", "note", f"{need}. Not measured: the run's page has no file of 1 MB or more to try")
    found = f"{need}; {_number(download.mbits)} Mbit/s down from the run's page; up was not measured"
    if download.mbits < traffic.mbits:
        remedy = "this link or the page's is slow: updates may come late, and the others go on without them"
        return DoctorFinding("link", "warning", found, remedy)
    return DoctorFinding("link", "ok", found)


def _number(n: float) -> str:
    return f"{n:,.0f}" if n >= 10 else f"{n:.2g}"
