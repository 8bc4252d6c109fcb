"""The inputs and targets of a model, from tokens that are marked or plain (`spec.DataSpec`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from protocol.spec import BEGINS, NUMBER, TRAINED, ConversationSpec

IGNORED = -100
"""The target of a token that is not trained: torch's cross entropy passes over it."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """The inputs and targets of a model, of some windows. All int64 [windows, window].

    `positions` begin at 0 with each document; None if the model numbers the tokens of a window itself. A target that
    is not trained is IGNORED.
    """

    tokens: Tensor
    targets: Tensor
    positions: Tensor | None

    def forward_arguments(self) -> dict[str, Tensor]:
        """Return the arguments of the model's forward pass."""
        return {"input_ids": self.tokens} | ({} if self.positions is None else {"position_ids": self.positions})


def inputs_of(windows: Tensor, conversations: ConversationSpec | None) -> ModelInputs:
    """Return what the model reads of windows [windows, window + 1] of a run's data.

    `conversations`: as in the spec; None for plain text, of which every token is trained.
    """
    windows = windows.long()
    if conversations is None:
        return ModelInputs(windows[:, :-1], windows[:, 1:], None)
    tokens, trained = windows & NUMBER, windows & TRAINED != 0
    targets = tokens.masked_fill(~trained, IGNORED)[:, 1:]
    if conversations.attention == "window":
        return ModelInputs(tokens[:, :-1], targets, None)
    places = torch.arange(windows.shape[1] - 1, device=windows.device).expand(len(windows), -1)
    starts = torch.where(windows[:, :-1] & BEGINS != 0, places, 0).cummax(1).values
    return ModelInputs(tokens[:, :-1], targets, places - starts)


def trained_tokens(windows: Tensor, conversations: ConversationSpec | None) -> int:
    """Return the number of targets of windows that are trained."""
    targets = windows[:, 1:]
    return targets.numel() if conversations is None else int((targets & TRAINED != 0).sum())
