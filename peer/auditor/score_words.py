"""The scores of a check in words, for logs and terminals."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from protocol.messages import Score


def score_words(scores: Iterable[Score]) -> str:
    """Return scores for people, such as "99.4% of signs agree (97% needed)"."""
    return ", ".join(_WORDS.get(s.name, _plain)(s) for s in ordered_scores(scores))


def ordered_scores(scores: Iterable[Score]) -> list[Score]:
    """Return scores in the order in which people read them: the one that decides most often comes first."""
    return sorted(scores, key=lambda s: (s.name not in ("signs", "gain"), s.name))


def _plain(score: Score) -> str:
    return f"{score.name} {score.value:.2f} ({score.threshold:.2f} needed)"


_WORDS: dict[str, Callable[[Score], str]] = {
    "signs": lambda s: f"{s.value:.1%} of signs agree ({s.threshold:.0%} needed)",
    "scale": lambda s: f"norms within {s.value:.0%} ({s.threshold:.0%} needed)",
    "gain": lambda s: f"its own windows gain {s.value:.2f} standard errors more than others ({s.threshold:.2f} needed)",
    "agreement": lambda s: f"{s.value:.1%} of signs agree with its round ({s.threshold:.1%} needed)",
    "fresh": lambda s: f"{s.value:+.1%} beside an earlier round ({s.threshold:+.1%} needed)",
    "apart": lambda s: f"{1 - s.value:.1%} of signs are another update's (at most {1 - s.threshold:.1%})",
    "quarter": lambda s: f"its worst quarter {s.value:.2f} ({s.threshold:.2f} needed)",
}
