"""The view of a volunteer on the own peer: rows for a terminal of any width, or one line. Pure: facts in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console
from rich.text import Text

from cairn.number_format import bar, percent
from cairn.status_view import PHASE
from protocol.ledger.credit_text import credit_text
from protocol.units import byte_size, count, duration

if TYPE_CHECKING:
    from peer.node.downloads import Download
    from peer.node.snapshot import Snapshot

LABEL = 10
"""Width of the column of labels."""

GAP = "   "
MAX_BAR = 24

MAX_DOWNLOADS = 4
"""Downloads that are shown at once."""

STEPS, STEP_SECONDS, MIN_STEP_SECONDS = 10, 30.0, 5.0
"""Without a terminal a download has a line at each of these steps, not sooner than the last, or after the second."""


@dataclass(frozen=True, slots=True)
class PeerEarnings:
    """The peer's totals at the coordinator. `fresh`: the coordinator answered the last request."""

    micro_credits: int
    pending: int
    rounds: int
    fresh: bool = True


@dataclass(frozen=True, slots=True)
class PeerView:
    """All that a volunteer is shown. `page` is the peer's own address on the run's page; "" while it is not known."""

    node: Snapshot
    earnings: PeerEarnings | None = None
    page: str = ""


Row = tuple[str, list[Text]]
"""A label, and cells that stay whole if they fit."""


def lines(view: PeerView, width: int) -> list[Text]:
    """Return the live lines, none wider than `width`. Nothing is left out: what does not fit goes to the next line."""
    return [line for row in rows(view, _bar_width(width)) for line in _fitted(row, width)]


def download_lines(downloads: Sequence[Download], width: int) -> list[Text]:
    """Return the live lines of downloads alone."""
    return [line for d in downloads for line in _fitted(("fetching", _download(d, _bar_width(width))), width)]


def _bar_width(width: int) -> int:
    return max(8, min(MAX_BAR, width - 68))


def one_line(view: PeerView) -> str:
    """Return the same facts, without downloads and the page's address, as one line of a log."""
    told = [row for row in rows(view, 0) if row[0] not in ("page", "fetching")]
    return "; ".join(f"{label} {', '.join(cell.plain for cell in cells)}" for label, cells in told)


def rows(view: PeerView, bar_width: int) -> list[Row]:
    """Return the rows; `bar_width` 0 leaves out the bars."""
    s = view.node
    found: list[Row] = [("run", list(_run(s, bar_width))), ("now", list(_now(s, bar_width)))]
    if s.rest:
        found.append(
            ("resting", [Text(s.rest + ("" if s.devices_free else "; its devices are being freed"), style="yellow")])
        )
    if s.orders:
        found.append(("orders", [Text(s.orders, style="yellow")]))
    found += [("fetching", _download(d, bar_width)) for d in s.downloads[:MAX_DOWNLOADS]]
    if s.phase == "observing":
        found.append(("checks", [Text("{made} made, {failed} failed, {waiting} wait".format_map(s.audits))]))
        found.append(("link", list(_link(s))))
        return found
    found.append(("speed" if s.device else "link", [*_speed(s), *_link(s)]))
    found.append(("update", list(_update(s, view.earnings))))
    found.append(("credits", list(_credits(view.earnings))))
    if view.page:
        found.append(("page", [Text(view.page, style=f"link {view.page}")]))
    return found


def _run(s: Snapshot, bar_width: int) -> Iterator[Text]:
    yield Text(f"{s.run}, as {s.name}" if s.name else s.run, style="bold")
    if s.total_tokens:
        left = s.total_tokens - s.accepted_tokens
        yield _progress(s.accepted_tokens / s.total_tokens, bar_width)
        if s.swarm_tokens_per_second > 0 and left > 0 and s.state:
            yield Text(f"about {duration(left / s.swarm_tokens_per_second)} left")
    peers = s.members + 1
    yield Text(f"{peers} peer{'s' * (peers != 1)}")


def _now(s: Snapshot, bar_width: int) -> Iterator[Text]:
    phase = "waiting" if s.phase == "training" and s.is_waiting else s.phase
    what = {
        "joining": f"joining: {'fetches what training needs' if s.downloads else 'asks the others what they have'}",
        "syncing": f"syncing: gets the state of round {s.round}",
        "exchanging": f"exchanging updates of round {s.round}",
        "leaving": "leaving: announces what is done",
        "waiting": f"waiting in round {s.round}: nothing to train for now",
    }.get(phase, f"{phase} round {s.round}")
    yield Text(what, style=PHASE.get(phase, ""))
    if s.phase == "training" and s.target_tokens:
        yield _progress(s.round_tokens / s.target_tokens, bar_width)
        missing, speed = s.target_tokens - s.round_tokens, s.swarm_tokens_per_second
        ends = [missing / speed] if speed > 0 else []
        ends += [] if s.round_seconds_left is None else [s.round_seconds_left]
        if ends:
            about = "about" if speed > 0 else "at most"  # without a speed only the limit is known
            yield Text(f"{about} {duration(min(ends))} left" if min(ends) >= 1 else "ends now")
    if not s.device and s.phase != "observing":
        yield Text("the trainer is starting", style="yellow")


def _progress(share: float, bar_width: int) -> Text:
    return Text(f"{bar(share, bar_width)} {percent(share):>4}" if bar_width else percent(share))


def _download(d: Download, bar_width: int) -> list[Text]:
    cells = [Text(d.what), _progress(d.held / max(1, d.size), bar_width)]
    cells.append(Text(f"{byte_size(d.held)} of {byte_size(d.size)}"))
    if d.per_second > 0:
        left = duration((d.size - d.held) / d.per_second)
        cells += [Text(f"{byte_size(d.per_second)}/s"), Text(f"about {left} left")]
    return cells


def _speed(s: Snapshot) -> Iterator[Text]:
    if s.device:
        yield Text(f"{count(s.tokens_per_second)} tokens/s", style="bold")
        if s.loss or not s.own_updates:  # a trainer that has just started has none for a while
            yield Text(f"loss {s.loss:.3f}" if s.loss else "no loss yet")
        if s.mfu is not None:
            yield Text(f"MFU {s.mfu:.0%}")


def _link(s: Snapshot) -> Iterator[Text]:
    yield Text(f"up {byte_size(s.up_per_second)}/s")
    yield Text(f"down {byte_size(s.down_per_second)}/s")


def _update(s: Snapshot, earnings: PeerEarnings | None) -> Iterator[Text]:
    fate = s.last_update
    if fate is None:
        since = "since this start" if earnings is not None and earnings.rounds else "yet"
        yield Text(f"none announced {since}", style="dim")
    elif fate.accepted is None:
        yield Text(f"announced in round {fate.round}, not decided yet", style="cyan")
    elif fate.accepted:
        yield Text(f"accepted in round {fate.round}", style="green")
    else:
        yield Text(f"not in round {fate.round}: {fate.reason}", style="yellow")
    if s.own_updates:
        yield Text(f"{s.own_updates} made, {s.missed_updates} missed", style="dim")


def _credits(earnings: PeerEarnings | None) -> Iterator[Text]:
    if earnings is None:
        yield Text("the coordinator has not said yet", style="dim")
        return
    if earnings.rounds:
        yield Text(f"{credit_text(earnings.micro_credits)} settled", style="bold")
        yield Text(f"{credit_text(earnings.pending)} pending")
        yield Text(f"for {earnings.rounds} round{'s' * (earnings.rounds != 1)}", style="dim")
    else:
        yield Text("none yet", style="dim")
    if not earnings.fresh:
        yield Text("the coordinator is silent", style="yellow")


def _fitted(row: Row, width: int) -> list[Text]:
    """Return a row as lines: cells side by side as long as they fit, and one that is too wide wrapped."""
    label, cells = row
    room = max(10, width - LABEL)
    made: list[Text] = []
    for cell in cells:
        pieces = [cell] if cell.cell_len <= room else list(cell.wrap(Console(width=room), room, overflow="fold"))
        if made and made[-1].cell_len + len(GAP) + pieces[0].cell_len <= room:
            made[-1] = Text.assemble(made[-1], GAP, pieces.pop(0))
        made += pieces
    for i, line in enumerate(made):
        line.rstrip()
        made[i] = Text.assemble((f"{label if i == 0 else '':<{LABEL}}", "dim"), line)
    return made


class DownloadLines:
    """The lines of downloads where there is no terminal. The log has a beginning and an end of each by itself."""

    def __init__(self) -> None:
        self._said: dict[str, tuple[int, float]] = {}
        """Of each download the step of its last line, and the time of it."""

    def due(self, downloads: Sequence[Download], now: float) -> list[tuple[str, Download]]:
        """Return the lines that are due at a time (seconds), each with its download."""
        steps = {d.blob: STEPS * d.held // max(1, d.size) for d in downloads}
        self._said = {blob: self._said.get(blob, (step, now)) for blob, step in steps.items()}
        found: list[tuple[str, Download]] = []
        for d in downloads:
            step, (before, at) = steps[d.blob], self._said[d.blob]
            enough = step > before and now - at >= MIN_STEP_SECONDS
            if step < STEPS and (enough or now - at >= STEP_SECONDS):
                self._said[d.blob] = (step, now)
                found.append((", ".join(cell.plain for cell in _download(d, 0)), d))
        return found
