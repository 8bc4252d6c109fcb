"""The results of the demo: losses on held-out text, a plot, a sample of text, the credits."""

from __future__ import annotations

import json
import urllib.request
from dataclasses import dataclass
from pathlib import Path

from protocol import extras
from protocol.errors import CairnError
from protocol.spec import RunSpec


@dataclass(frozen=True)
class Judged:
    """Held-out loss (nats a token) and a sample of text, before and after training."""

    before: float
    after: float
    text_before: str
    text_after: str


def judge(spec: RunSpec, shards: list[Path], before: Path, after: Path, prompt: str) -> Judged:
    """Evaluate two archived states (folders of `checkpoints.archive`) on the files of the validation shards."""
    from cairn.commands.generate import generate_text
    from coordinator.checkpoints.evaluation import load_archived, measure

    losses = [measure(load_archived(f), spec.data, shards, max_windows=256).loss for f in (before, after)]
    tokens = min(60, spec.data.window // 2)  # a model may read no more than a window
    texts = [generate_text(f, prompt, tokens=tokens, temperature=0.7, seed=1) for f in (before, after)]
    return Judged(losses[0], losses[1], texts[0], texts[1])


@dataclass(frozen=True)
class LossPoint:
    """The training loss of a round, and the tokens accepted up to its end, also those that were voided later."""

    round: int
    tokens: int
    loss: float


def loss_curve(page: str) -> list[LossPoint]:
    """Return the loss so far, from the page's JSON. Raises CairnError if the page does not answer."""
    try:
        with urllib.request.urlopen(page.rstrip("/") + "/api/charts", timeout=10) as reply:
            charts = json.loads(reply.read(10_000_000))
    except (OSError, ValueError) as e:
        raise CairnError(f"the coordinator's page at {page} does not answer: {e}") from None
    columns = zip(charts["rounds"], charts["tokens"], charts["loss"], strict=True)
    return [LossPoint(int(r), int(t), float(x)) for r, t, x in columns if x is not None]


def plot(curve: list[LossPoint], judged: Judged, file: Path, events: list[tuple[int, str]]) -> str:
    """Draw the loss by accepted tokens as a PNG. Return the reason if that cannot be done, else nothing.

    `events` are pairs of a round, at whose start it is drawn, and a label.
    """
    try:
        import matplotlib
    except ImportError:
        return f"none, since matplotlib is not installed: {extras.install('demo')}"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 4.5), dpi=120)
    axes.plot([p.tokens / 1e3 for p in curve], [p.loss for p in curve], color="#0b7285", label="training loss")
    if curve:
        ends = [0, curve[-1].tokens / 1e3]
        axes.plot(ends, [judged.before, judged.after], "o", color="#c92a2a", label="held-out loss")
    for round_, what in events:
        tokens = max((p.tokens for p in curve if p.round < round_), default=0)
        axes.axvline(tokens / 1e3, color="#868e96", linewidth=0.8, linestyle="--")
        axes.annotate(
            what, (tokens / 1e3, axes.get_ylim()[1]), rotation=90, va="top", ha="right", fontsize=8, color="#495057"
        )
    axes.set_xlabel("accepted tokens (thousands)")
    axes.set_ylabel("loss (nats a token)")
    axes.set_title("Four peers, one model: State of the Union addresses")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
    return ""
