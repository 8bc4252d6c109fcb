"""Training on marked tokens: what counts in the loss, what a token sees, and that pieces make no difference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from peer.training.inner_optimizer import InnerOptimizer
from protocol import packed_sequences
from protocol.errors import SpecError
from protocol.marked_tokens import IGNORED, inputs_of
from protocol.model import build_model
from protocol.spec import BEGINS, NUMBER, TRAINED, ConversationSpec, InnerSpec, Schedule
from tests.support.marked import APART, marked_windows
from tests.support.specs import TINY_LLAMA

CPU = torch.device("cpu")
WIDTH = 24
WHOLE = ConversationSpec(window_tokens=5, attention="window")


def optimizer(
    conversations: ConversationSpec | None = APART, kind: str = "llama", batch: int = 4, **config: float
) -> InnerOptimizer:
    spec = InnerSpec(lr=1e-3, batch=batch, clip_norm=1e6, optimizer="adamw", schedule=Schedule(kind="constant"))
    fields = TINY_LLAMA | {"model_type": kind, "vocab_size": 64} | config
    if kind == "gpt_neox":
        del fields["num_key_value_heads"]
    model = build_model(fields, seed=1)
    return InnerOptimizer(spec, model, CPU, conversations=conversations)


def gradient(inner: InnerOptimizer, windows: Tensor) -> tuple[float, dict[str, Tensor]]:
    step = inner.forward_backward(windows)
    assert step is not None and step.is_finite
    return step.loss, {n: p.grad.clone() for n, p in inner.parameters.items() if p.grad is not None}


def windows(seed: int = 0, count: int = 4) -> Tensor:
    return marked_windows(seed, count, WIDTH, 64, torch.int64)


def test_the_loss_is_the_mean_over_the_trained_tokens_of_the_step():
    inner, given = optimizer(), windows()
    inputs = inputs_of(given, APART)
    with packed_sequences.documents_apart(True):
        logits = inner.model(**inputs.forward_arguments(), use_cache=False).logits
    losses = cross_entropy(logits.transpose(1, 2), given[:, 1:] & NUMBER, reduction="none")
    counted = losses[(given[:, 1:] & TRAINED) != 0]
    loss, _ = gradient(inner, given)
    assert loss == pytest.approx(counted.mean().item(), rel=1e-5)


def test_tokens_that_are_not_trained_are_no_targets():
    inner, given = optimizer(), windows()
    _, before = gradient(inner, given)
    # Target t is read again as input t + 1, so only a window's last target can change alone.
    changed = given.clone()
    changed[:, -1] = (changed[:, -1] & ~NUMBER) | ((changed[:, -1] & NUMBER) + 7) % 64
    assert not ((given[:, -1] & TRAINED) != 0).any() and not torch.equal(changed, given)
    _, after = gradient(inner, changed)
    assert all(torch.equal(before[n], after[n]) for n in before)
    nothing = given & ~TRAINED
    loss, none = gradient(inner, nothing)
    assert loss == 0 and all(not g.any() for g in none.values())


@pytest.mark.parametrize("pieces", [1, 2, 3])
def test_pieces_make_the_gradient_of_one_large_batch(pieces, monkeypatch):
    given = windows(count=6)
    counts = ((given[:, 1:] & TRAINED) != 0).sum(1)
    assert counts.max() > 2 * counts.min()  # a mean of the pieces' means would be another number
    monkeypatch.setattr("peer.training.inner_optimizer.PIECE_TOKENS", 6 * WIDTH)
    loss, whole = gradient(optimizer(batch=6), given)
    monkeypatch.setattr("peer.training.inner_optimizer.PIECE_TOKENS", pieces * WIDTH)
    again, parts = gradient(optimizer(batch=6), given)
    assert again == pytest.approx(loss, rel=1e-6)
    assert all(torch.allclose(parts[n], whole[n], rtol=1e-4, atol=1e-7) for n in whole)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mistral", "gpt_neox"])
def test_a_document_is_trained_as_if_it_were_alone(kind):
    inner = optimizer(kind=kind)
    one, two = windows(1, 1)[0, :10] & NUMBER, windows(2, 1)[0, : WIDTH + 1 - 10] & NUMBER
    one[0], two[0] = one[0] | BEGINS, two[0] | BEGINS
    one[3:], two[5:] = one[3:] | TRAINED, two[5:] | TRAINED
    pads = torch.full((WIDTH + 1,), 2)
    pads[0] |= BEGINS
    together = torch.cat([one, two])[None]
    apart = torch.stack([torch.cat([d, pads])[: WIDTH + 1] for d in (one, two)])
    for joined, alone in zip(gradient(inner, together)[1].values(), gradient(inner, apart)[1].values(), strict=True):
        assert torch.allclose(joined, alone, rtol=1e-3, atol=1e-6)
    # Nor would it be so if a token saw its whole window.
    crossed = gradient(optimizer(WHOLE, kind), together)[1]
    name = next(n for n in crossed if "embed" in n)
    assert not torch.allclose(crossed[name], gradient(inner, apart)[1][name], rtol=1e-3, atol=1e-6)


def test_positions_begin_anew_with_each_document():
    tokens = torch.tensor([[5 | BEGINS, 6 | TRAINED, 7, 8 | BEGINS, 9 | TRAINED, 1 | BEGINS, 1 | BEGINS]])
    inputs = inputs_of(tokens, APART)
    assert inputs.positions is not None and inputs.positions.tolist() == [[0, 1, 2, 0, 1, 0]]
    assert inputs.tokens.tolist() == [[5, 6, 7, 8, 9, 1]]
    assert inputs.targets.tolist() == [[6, IGNORED, IGNORED, 9, IGNORED, IGNORED]]
    assert inputs_of(tokens, WHOLE).positions is None


def test_a_transformers_that_cannot_keep_documents_apart_is_refused_before_the_first_step(monkeypatch):
    monkeypatch.setattr(packed_sequences, "control_detection", lambda: False)
    with pytest.raises(SpecError, match="cannot: install a newer one .*pip install --upgrade transformers"):
        optimizer()
    optimizer(None)
    assert optimizer(WHOLE).window_losses(windows()).isfinite().all()


def test_a_window_s_loss_is_the_mean_of_its_trained_tokens():
    inner, given = optimizer(), windows(3, 3)
    losses = inner.window_losses(given)
    for row, loss in zip(given, losses.tolist(), strict=True):
        assert loss == pytest.approx(gradient(inner, row[None])[0], rel=1e-5)


@pytest.mark.parametrize("is_training", [True, False])
def test_a_window_s_loss_is_measured_without_dropout(is_training):
    inner, given = optimizer(attention_dropout=0.5), windows(3, 3)
    inner.model.train(is_training)
    losses = inner.window_losses(given)
    assert torch.equal(inner.window_losses(given), losses) and inner.model.training == is_training
    assert torch.allclose(losses, optimizer().window_losses(given))


def test_plain_text_after_conversations_is_not_searched_for_documents():
    """Both may be trained in one process: the way of looking is set for each pass."""
    plain, tokens = optimizer(None), torch.randint(0, 64, (4, WIDTH + 1), generator=torch.Generator().manual_seed(0))
    before = gradient(plain, tokens)
    gradient(optimizer(), windows())
    after = gradient(plain, tokens)
    assert before[0] == after[0] and all(torch.equal(before[1][n], after[1][n]) for n in before[1])
