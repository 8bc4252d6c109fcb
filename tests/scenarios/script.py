"""The form of a scenario's TOML file. Pure.

    what = "one sentence: what must work"
    core = true                      # it is also run by `make test`, where there can be an emulated internet
    limit_seconds = 300              # of it all

    [run]                            # over the tiny run of tests/e2e/world.py; its founders are named by their hosts
    round = { target_tokens = 65536 }

    [default]                        # the line between two hosts
    rtt_ms = 80
    loss = 0.01

    [[hosts]]                        # a peer on each, but on "home", which is the coordinator's and always there
    name = "ada"
    up_mbit = 20
    down_mbit = 100
    nat = true                       # or "symmetric"; `behind = "ada"` shares ada's gateway
    clock = 3600                     # seconds that its clock is ahead
    speed = 0.125                    # of what the others train; by SIGSTOP of its trainer, again and again
    faulty = true                    # it serves chunks of states with a bit that is wrong
    audits = true                    # it audits others' updates, on a CPU
    liar = true                      # its updates are noise, with the largest claims

    [[pairs]]
    between = ["ada", "alan"]
    rtt_ms = 250

    [[steps]]                        # one after the other
    do = "start"
    peers = ["ada", "alan"]

Steps: see the classes below. `peers` left out means all that were started, and neither stopped nor lost their power.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from coordinator.authoring.toml_file import tomllib
from tests.wan.topology import Topology, WanError

HOME = "home"
"""The coordinator's host."""

Names = tuple[str, ...]
Seconds = Annotated[float, Field(gt=0, le=3600)]


class ScriptError(Exception):
    """Not a scenario; says what is wrong, and in which file."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class OfPeers(_Part):
    peers: Names = ()


class Start(OfPeers):
    """Start peers (again: the same home, so the same peer); `wait`: until each trains.

    `old_invite`: with the invite that there was before the coordinator moved.
    """

    do: Literal["start"]
    wait: bool = True
    old_invite: bool = False
    seconds: Seconds = 150


class History(OfPeers):
    """Before the first start: these peers have `rounds` rounds behind them (see `history`)."""

    do: Literal["history"]
    rounds: int = Field(ge=1, le=2000)


class Rounds(OfPeers):
    """Until these are `count` rounds further than the first of them is now."""

    do: Literal["rounds"]
    count: int = Field(ge=1, le=500)
    seconds: Seconds = 120


class Wait(_Part):
    do: Literal["wait"]
    seconds: Seconds


class Cut(_Part):
    """Nothing passes between these two groups of hosts (from the first to the second alone if `oneway`)."""

    do: Literal["cut"]
    between: tuple[Names, Names]
    oneway: bool = False


class Heal(_Part):
    """All lines are whole again."""

    do: Literal["heal"]


class Flap(_Part):
    """Cut and heal the lines between two groups again and again."""

    do: Literal["flap"]
    between: tuple[Names, Names]
    times: int = Field(ge=1, le=100)
    off: Seconds
    on: Seconds


class Interrupt(OfPeers):
    """Each of these is cut off from everybody for `off` seconds when `share` of a state that it fetches has come."""

    do: Literal["interrupt"]
    share: float = Field(default=0.5, gt=0, lt=1)
    off: Seconds
    seconds: Seconds = 120


class PowerOff(OfPeers):
    """Hosts lose their power: no farewell, and no packet. "home" is the coordinator's."""

    do: Literal["power off"]


class Stop(OfPeers):
    """SIGTERM, and wait for the end."""

    do: Literal["stop"]


class Freeze(OfPeers):
    """SIGSTOP for everything on these hosts; `exchanging`: in the middle of an exchange."""

    do: Literal["freeze"]
    exchanging: bool = False


class Thaw(OfPeers):
    do: Literal["thaw"]


class Coordinator(_Part):
    """Start the coordinator (again), `moved` to another port, which no invite knows."""

    do: Literal["coordinator"]
    moved: bool = False


class Churn(OfPeers):
    """Churn for a number of rounds: after each, every peer loses power with chance 1/`life`, and is back `away`
    seconds later.

    At most half of them are away, or back and not training yet, at a time: what only those hold who are away must wait
    for them.
    """

    do: Literal["churn"]
    rounds: int = Field(ge=1, le=500)
    life: float = Field(gt=1)
    away: Seconds = 5
    seed: int = 0
    seconds: Seconds = 600


class Damage(OfPeers):
    """Of a peer that is off: the end of its newest checkpoint or update is torn off, or its disk is full."""

    do: Literal["damage"]
    how: Literal["torn", "full"]


class OneChain(OfPeers):
    """All hold the same chain up to the last round but one, and equal states, within `rounds` rounds of that chain.

    From then on no two of them may hold different states after one record, until one's state was seen of all. "home"
    may be among them: its chain is looked at, it holds no state.
    """

    do: Literal["expect one chain"]
    rounds: int = Field(default=2, ge=1)
    seconds: Seconds = 60


class Forks(OfPeers):
    """On the disks of these peers no lost branch has more than `most` records: no fork lasted longer."""

    do: Literal["expect forks"]
    most: int = Field(default=1, ge=0)


class Contribute(OfPeers):
    """Each of these is in at least `share` of the last `last` rounds."""

    do: Literal["expect contributions"]
    last: int = Field(ge=1)
    share: float = Field(default=0.5, gt=0, le=1)


class Joined(OfPeers):
    """Each of these trains within `seconds`, and contributes at most `rounds` rounds after its trainer was ready."""

    do: Literal["expect joined"]
    rounds: int = Field(default=2, ge=1)
    seconds: Seconds = 90


class Download(OfPeers):
    """Each of these has fetched a state (the largest blob that it fetched, since it was started last).

    Meanwhile `share` of its downlink was used, and at least `donors` hosts sent a tenth of the state or more each. No
    more than `most` times the state's size came over the link, since interrupted downloads continue.
    """

    do: Literal["expect download"]
    share: float = Field(default=0.0, ge=0, le=1)
    donors: int = Field(default=2, ge=1)
    most: float = Field(default=2.0, gt=1)


class Goodput(OfPeers):
    """At least `share` of the work of these peers' trainers in all their lives was accepted, each window once.

    Undecided work is not counted. Work that a power cut destroyed within a round counts as lost, and is reported.
    `each`: of every one of them, not only of all together.
    """

    do: Literal["expect goodput"]
    share: float = Field(gt=0, le=1)
    each: bool = False


class PutBack(OfPeers):
    """Every update of these peers in this life that the chain does not have went back into their error feedback.

    The last one or two are open and do not count. There were at least `least` of them in all.
    """

    do: Literal["expect put back"]
    least: int = Field(default=1, ge=0)
    seconds: Seconds = 20


class Carried(OfPeers):
    """Since the last one of them was started these peers were in fewer rounds than there were: in `fewest` or more, and
    in at most `share` of them. (That what they did was accepted at last is `expect goodput`'s to say.)
    """

    do: Literal["expect carried"]
    fewest: int = Field(default=2, ge=1)
    share: float = Field(default=0.7, gt=0, lt=1)


class Pace(OfPeers):
    """The median of the last `last` rounds took at most `factor` times that of the rounds before the first fault.

    Rounds count from when the last peer that was started then has been training.
    """

    do: Literal["expect pace"]
    last: int = Field(ge=1)
    factor: float = Field(gt=0)


class Credits(OfPeers):
    """`cairn status` on one of these hosts, with the oldest invite, agrees with the chain: the credits of everybody,
    of every round. They are settled for all but the newest rounds."""

    do: Literal["expect credits"]
    seconds: Seconds = 60


class Audits(OfPeers):
    """Records carry `least` replays or more of these peers' updates, all passed. Of all, the `liars` are convicted."""

    do: Literal["expect audits"]
    least: int = Field(ge=1)
    liars: Names = ()
    seconds: Seconds = 300


class Logged(OfPeers):
    """Each of these has logged something that this pattern finds, at least `least` and at most `most` times."""

    do: Literal["expect log"]
    pattern: str
    least: int = Field(default=1, ge=0)
    most: int = Field(default=10**6, ge=0)


class Ended(OfPeers):
    """Each of these has ended with a message that this pattern finds."""

    do: Literal["expect end"]
    pattern: str
    seconds: Seconds = 60


Step = Annotated[
    Start | History | Rounds | Wait | Cut | Heal | Flap | Interrupt | PowerOff | Stop | Freeze | Thaw | Coordinator
    | Churn | Damage | OneChain | Forks | Contribute | Joined | Download | Goodput | PutBack | Carried | Pace | Credits
    | Audits | Logged | Ended,
    Field(discriminator="do"),
]  # fmt: skip


class HostOf(_Part):
    name: str
    up_mbit: float = 100
    down_mbit: float = 100
    nat: bool | Literal["symmetric"] = False
    behind: str = ""
    clock: float = 0
    speed: float = Field(default=1, gt=0, le=1)
    faulty: bool = False
    audits: bool = False
    liar: bool = False


class PairOf(_Part):
    between: tuple[str, str]
    rtt_ms: float | None = None
    loss: float | None = None


class LineOf(_Part):
    rtt_ms: float = 80
    loss: float = 0


class Scenario(_Part):
    """`name` is the file's."""

    name: str
    what: str
    core: bool = False
    limit_seconds: Annotated[float, Field(gt=0, le=7200)] = 600
    run: dict[str, dict[str, Any]] = {}
    default: LineOf = LineOf()
    hosts: tuple[HostOf, ...]
    pairs: tuple[PairOf, ...] = ()
    steps: tuple[Step, ...]

    @property
    def peers(self) -> list[str]:
        return [h.name for h in self.hosts if h.name != HOME]

    @property
    def nat(self) -> bool:
        return any(h.nat for h in self.hosts)

    @model_validator(mode="after")
    def _names(self) -> Scenario:
        there = {h.name for h in self.hosts} | {HOME}
        shared = {h.name for h in self.hosts if h.behind}
        for number, step in enumerate(self.steps, 1):
            between = getattr(step, "between", ((), ()))
            for name in (*getattr(step, "peers", ()), *getattr(step, "liars", ()), *between[0], *between[1]):
                if name not in there:
                    raise ValueError(f"step {number} ({step.do}): there is no host {name!r}")
                if name in shared and step.do in ("cut", "flap", "power off", "churn", "interrupt"):
                    raise ValueError(f"step {number} ({step.do}): {name} has no line of its own")
        return self

    @property
    def window(self) -> int:
        """Tokens of a window of the run's data."""
        return int(self.run.get("data", {}).get("window", 32))

    def topology(self) -> Topology:
        """Raises WanError."""
        hosts = [h for h in self.hosts if h.name != HOME]
        home = next((h for h in self.hosts if h.name == HOME), HostOf(name=HOME))
        only = {"name", "up_mbit", "down_mbit", "nat", "behind"}
        return Topology.parse(
            {
                "default": self.default.model_dump(),
                "hosts": [{k: v for k, v in h.model_dump(include=only).items() if v != ""} for h in (home, *hosts)],
                "pairs": [
                    {"a": p.between[0], "b": p.between[1]} | p.model_dump(include={"rtt_ms", "loss"}, exclude_none=True)
                    for p in self.pairs
                ],
            }
        )


FOLDER = Path(__file__).parent


def names() -> list[str]:
    """Return all scenarios."""
    return sorted(p.stem for p in FOLDER.glob("*.toml"))


def read(name: str) -> Scenario:
    """Raises ScriptError."""
    path = FOLDER / f"{name}.toml"
    try:
        scenario = Scenario.model_validate({"name": name, **tomllib.loads(path.read_text())})
        scenario.topology()
    except FileNotFoundError:
        raise ScriptError(f"there is no scenario {name!r}: there are {', '.join(names())}") from None
    except ValidationError as e:
        first = e.errors()[0]
        raise ScriptError(f"{path}: {'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except (tomllib.TOMLDecodeError, WanError) as e:
        raise ScriptError(f"{path}: {e}") from None
    return scenario
