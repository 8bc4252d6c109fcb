"""Makes the input of the alert rules from an overview and the folder's disk."""

from __future__ import annotations

from pathlib import Path
from shutil import disk_usage

from coordinator.alerts.rules import AlertInput
from coordinator.overview import Overview
from protocol.spec import RoundSpec


def alert_input(
    o: Overview, rules: RoundSpec, folder: Path, *, now: float, up: float, caught_up: bool, head_age: float | None,
    validation_losses: tuple[float, ...] = (), log_problem: str = "",
) -> AlertInput:  # fmt: skip
    """Return the input of the rules.

    `rules` is the round policy in force, `up` the seconds since the start. `head_age` is the seconds since the newest
    tree head, None if there is none. `validation_losses` and `log_problem` are as in `AlertInput`.
    """
    r, usage = rules, disk_usage(folder)
    return AlertInput(
        time=now, up=up, health=o.health, message=o.message, problem=o.problem, caught_up=caught_up, round=o.round,
        round_limit=r.max_seconds + r.exchange_seconds + r.patience_seconds, losses=tuple(x.loss for x in o.rounds),
        training=o.training, diverged=o.diverged, disk_free=usage.free, disk_size=usage.total, head_age=head_age,
        validation_losses=validation_losses, archive_problem=o.archive_problem, log_problem=log_problem,
    )  # fmt: skip
