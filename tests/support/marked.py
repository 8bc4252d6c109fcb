"""Windows of marked tokens, for tests that train on conversations."""

from __future__ import annotations

import torch
from torch import Tensor

from protocol.spec import BEGINS, TRAINED, ConversationSpec

APART = ConversationSpec(window_tokens=5, attention="document")


def marked_windows(seed: int, count: int, width: int, vocabulary: int, dtype: torch.dtype = torch.int32) -> Tensor:
    """Return windows of `width` + 1 tokens with documents of random lengths, each with another share of trained tokens.

    A document's first token is never trained.
    """
    chance = torch.Generator().manual_seed(seed)
    size = (count, width + 1)
    tokens = torch.randint(0, vocabulary, size, generator=chance)
    begins = torch.rand(size, generator=chance) < 0.2
    begins[:, 0] = begins[:, -1] = True
    share = torch.linspace(0.1, 0.9, count)[:, None]
    trained = (torch.rand(size, generator=chance) < share) & ~begins
    trained[:, 1] |= ~begins[:, 1]  # at least one, nearly always
    return (tokens + BEGINS * begins + TRAINED * trained).to(dtype)
