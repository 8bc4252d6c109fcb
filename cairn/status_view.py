"""A status as lines for the terminal: state, progress, loss, alerts, peers, rounds. Pure: a status in, lines out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from cairn.number_format import bar, percent, sparkline
from protocol.ledger.credit_text import credit_text
from protocol.units import byte_size, count, duration

HEALTH = {
    "healthy": "bold green", "finished": "bold green", "waiting": "bold", "idle": "bold", "catching up": "bold cyan",
    "paused": "bold cyan", "ended": "bold", "stalled": "bold yellow", "split": "bold red", "trouble": "bold red",
}  # fmt: skip
PHASE = {
    "training": "green", "exchanging": "cyan", "syncing": "yellow", "joining": "yellow", "paused": "cyan",
    "resting": "dim cyan", "silent": "dim", "gone": "dim", "banned": "red", "barred": "red",
}  # fmt: skip
FEW_ROUNDS = 5
WIDE = 100
"""Columns from which on lines and tables say more."""


def headline(s: Any) -> Text:
    """Return the run's name, its state, and a sentence about the state."""
    text = Text(s.name, style="bold").append("  ")
    return text.append(s.health, style=HEALTH.get(s.health, "bold")).append(f": {s.message}", style="not bold")


def progress(s: Any, width: int) -> Text:
    """Return the run's progress: tokens, speed, time to go, finalized round, and in wide terminals the head."""
    text = Text("run   ", style="dim")
    if s.total_tokens:
        share = s.tokens / s.total_tokens
        text.append(f"{bar(share, max(10, min(24, width - 68)))} {percent(share)}  ", style="not dim")
        text.append(f"{count(s.tokens)} of {count(s.total_tokens)} tokens", style="not dim")
    else:
        text.append(f"{count(s.tokens)} tokens", style="not dim")
    final = "none" if s.final_round is None else str(s.final_round)
    if (speed := s.tokens_per_second) > 0:
        text.append(f"  {count(speed)}/s", style="not dim")
        if s.total_tokens > s.tokens:
            text.append(f"  about {duration((s.total_tokens - s.tokens) / speed)} left", style="not dim")
    head = f"  head {s.head.short}" if width >= WIDE else ""
    return text.append(f"  final {final}{head}", style="not dim")


def losses(s: Any, width: int) -> Text | None:
    """Return the loss as a line of bars; None before the first loss."""
    if not s.losses:
        return None
    text = Text("loss  ", style="dim").append(sparkline(list(s.losses), max(10, width - 16)), style="not dim cyan")
    return text.append(f"  {s.loss:.3f}", style="not dim")


def alerts(s: Any, now: float) -> list[Text]:
    """Return a line for each alert."""
    return [
        Text("ALERT ", style="bold red").append(
            f"{a.name} for {duration(now - a.since)}: {a.message}", style="not bold"
        )
        for a in s.alerts
    ]


def table(
    titles: Sequence[str], rows: Sequence[Sequence[Text | str]], width: int, *, left: set[str], gives: str
) -> Table:
    """Return a table with columns as wide as their cells; the column `gives` shrinks so that the table fits `width`.

    Columns named in `left` are aligned to the left, the others to the right.
    """
    cells = [[c if isinstance(c, Text) else Text(c) for c in row] for row in rows]
    widths = [max([cell_len(t), *(row[i].cell_len for row in cells)]) for i, t in enumerate(titles)]
    at = list(titles).index(gives)
    widths[at] = max(6, min(widths[at], width - sum(widths) + widths[at] - 2 * (len(titles) - 1)))
    made = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    for title, w in zip(titles, widths, strict=True):
        made.add_column(
            title.strip(), width=w, no_wrap=True, overflow="ellipsis", justify="left" if title in left else "right"
        )
    for row in cells:
        made.add_row(*row)
    return made


def peer_table(s: Any, width: int, most: int | None = None) -> RenderableType:
    """Return the peers in the coordinator's order; those beyond `most` are counted by state."""
    if not s.peers:
        return Text("no peer is known yet", style="dim")
    wide = width >= WIDE
    shown = s.peers if most is None else s.peers[:most]
    rows: list[list[Text | str]] = []
    for p in shown:
        quiet = p.phase in ("silent", "gone", "banned", "barred")
        timed = p.phase in ("silent", "gone") and p.seconds_since_heartbeat > 0  # 0: not known
        state = f"{p.phase} {duration(p.seconds_since_heartbeat)}" if timed else p.phase
        rows.append([
            p.peer.short, "-" if p.name == p.peer.short else p.name, Text(state, style=PHASE.get(p.phase, "")),
            str(p.round), f"{p.loss:.3f}" if p.loss else "-", "-" if quiet else count(p.tokens_per_second),
            *((byte_size(p.bytes_up), byte_size(p.bytes_down)) if wide else ()),
            credit_text(p.micro_credits_settled + p.micro_credits_pending), *((p.device,) if wide else ()),
        ])  # fmt: skip
    titles = ["peer", "name", "state", "round", "loss", "tokens/s"]
    titles += ["up", "down", "credits", "device"] if wide else ["credits"]
    made = table(titles, rows, width, left={"peer", "name", "state", "device"}, gives="device" if wide else "name")
    if remaining := s.peers[len(shown) :]:
        phases = ", ".join(f"{n} {phase}" for phase, n in Counter(p.phase for p in remaining).most_common(4))
        return Group(made, Text(f"and {len(remaining)} more: {phases}", style="dim", no_wrap=True, overflow="ellipsis"))
    return made


def round_table(s: Any, width: int, most: int = FEW_ROUNDS) -> RenderableType | None:
    """Return the newest rounds with their contributors and the members that are absent; None without rounds."""
    rows: list[list[Text | str]] = []
    for r in s.rounds[:most]:
        more = r.absent_total - len(r.absent)
        absent = ", ".join(r.absent) + (f" and {more} more" if more else "")
        final = Text("final" if r.final else "not final", style="dim")
        rows.append([str(r.round), f"{r.loss:.3f}", count(r.tokens), str(r.contributors), final, absent or "-"])
    titles = ("round", "loss", "tokens", "in it", "", "trained, but not in it")
    return table(titles, rows, width, left={titles[4], titles[5]}, gives=titles[5]) if rows else None


def whole(s: Any, width: int, now: float) -> Group:
    """Return everything, of any length, for `cairn status`."""
    parts = [headline(s), progress(s, width), losses(s, width), *alerts(s, now), Text(""), peer_table(s, width)]
    if (rounds := round_table(s, width)) is not None:
        parts += [Text(""), rounds]
    if s.convictions:
        parts += [Text(""), *(Text("BARRED ", style="bold red").append(c, style="not bold") for c in s.convictions)]
    return Group(*(p for p in parts if p is not None), Text(f"\npage  {s.page}", style="dim"))


def fitted(s: Any, width: int, height: int, now: float, note: Text) -> Group:
    """Return the most important lines that fit the screen, for `cairn watch`; `note` is the last line."""
    top = [headline(s), progress(s, width)]
    if (line := losses(s, width)) is not None:
        top.append(line)
    told = alerts(s, now)
    for text in told[:3]:
        text.truncate(width, overflow="ellipsis")
        top.append(text)
    paper = Console(width=width)
    used = sum(len(t.wrap(paper, width)) for t in top)
    rounds = round_table(s, width, max(0, min(FEW_ROUNDS, (height - used - 6) // 3)))
    below = 0 if rounds is None else 2 + min(FEW_ROUNDS, max(0, (height - used - 6) // 3), len(s.rounds))
    room = height - used - below - 5  # blank, header, count of the others, blank, note
    parts: list[RenderableType] = [*top, Text(""), peer_table(s, width, max(1, room))]
    if rounds is not None and below > 2:
        parts += [Text(""), rounds]
    return Group(*parts, Text(""), note)
