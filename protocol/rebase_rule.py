"""The rule for `UpdateHeader.rebase_window`, for headers that arrive and for those in records (docs/rounds.md)."""

from __future__ import annotations

from protocol.messages import UpdateHeader


def rebase_refusal(header: UpdateHeader, replay_batch: int | None, *, continues: bool) -> str | None:
    """Return why a header's `rebase_window` breaks the rule; None when it does not.

    `replay_batch`: windows of one inner step in a run whose updates are replayable, else None. `continues`: the record
    that the header follows lists an update of the same author. Only then do all know from which position the author
    trained until the new state came.
    """
    first, rebase, end = header.first_window, header.rebase_window, header.end_window
    if replay_batch is None:
        if rebase != first:
            return f"its rebase_window is {rebase}, not {first}: updates of this run are not replayable"
        return None
    if not first <= rebase <= end:
        return f"its rebase_window is {rebase}, outside its windows from {first} to {end}"
    if rebase != first and not continues:
        return f"its rebase_window is {rebase}, not {first}: the previous record lists no update of its author"
    if (rebase - first) % replay_batch or (end - first) % replay_batch:
        return f"its windows {first}, {rebase}, {end} are not whole inner steps of {replay_batch} windows"
    return None
