"""Pictures as SVG: badges with the state of the run or the credits of a volunteer, and the invite as a QR code."""

from __future__ import annotations

import io
from html import escape

import segno

from coordinator.overview import Overview
from protocol.ledger.credit_text import credit_text

SVG_TYPE = "image/svg+xml"
COLORS = {
    "healthy": "#0f766e", "finished": "#0f766e", "ended": "#566275", "stalled": "#b91c1c", "trouble": "#b91c1c",
}  # fmt: skip
OTHER = "#9a4a06"
"""The colour of a badge in every other state."""

LETTER = 6.1
"""Width of a letter in px; `textLength` makes every font keep it."""


def run_badge(o: Overview) -> bytes:
    """Return the run's name, state, progress and peers."""
    said = [o.health]
    if o.total_tokens:
        said.append(f"{min(1.0, o.tokens / o.total_tokens):.0%}")
    if o.health not in ("finished", "ended"):
        said.append(f"{o.training} peer{'' if o.training == 1 else 's'}")
    return _badge(o.name, said, COLORS.get(o.health, OTHER))


def volunteer_badge(name: str, micro_credits: int, rounds: int) -> bytes:
    """Return the name of a peer or an account, its settled credits and its rounds."""
    said = [f"{credit_text(micro_credits)} credits", f"{rounds} round{'' if rounds == 1 else 's'}"]
    return _badge(name, said, COLORS["healthy"])


def _badge(name: str, said: list[str], color: str) -> bytes:
    state = " · ".join(said)
    left, right = (round(LETTER * len(text)) + 16 for text in (name, state))

    def text(at: float, words: str) -> str:
        size = f'textLength="{LETTER * len(words):.0f}" lengthAdjust="spacingAndGlyphs"'
        return f'<text x="{at:.0f}" y="14" {size}>{escape(words)}</text>'

    about = escape(f"{name}: {state}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + right}" height="20" role="img" aria-label="{about}">'
        f"<title>{about}</title>"
        f'<clipPath id="r"><rect width="{left + right}" height="20" rx="3"/></clipPath><g clip-path="url(#r)">'
        f'<rect width="{left}" height="20" fill="#334155"/>'
        f'<rect x="{left}" width="{right}" height="20" fill="{color}"/></g>'
        '<g fill="#fff" text-anchor="middle" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11">'
        f"{text(left / 2, name)}{text(left + right / 2, state)}</g></svg>"
    ).encode()


def qr_code(text: str) -> bytes:
    """Return a text as a QR code, dark on light with its quiet zone."""
    out = io.BytesIO()
    code = segno.make_qr(text, error="l")
    code.save(out, kind="svg", border=4, dark="#000", light="#fff", xmldecl=False, omitsize=True)
    return out.getvalue()
