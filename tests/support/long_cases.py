"""Cases of a test that only `make test-long` runs."""

from __future__ import annotations

from typing import Any

import pytest


def long_cases(*cases: Any) -> list[Any]:
    """Return parameters for `pytest.mark.parametrize`, marked as long; a tuple is one case of several arguments."""
    return [pytest.param(*(c if isinstance(c, tuple) else (c,)), marks=pytest.mark.long) for c in cases]
