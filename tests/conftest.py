"""What all tests share: property tests without a stopwatch, since the machines that run them are shared."""

from __future__ import annotations

import os

import hypothesis

# Before torch is imported by anybody: small tensors on shared cores gain nothing from threads.
os.environ.setdefault("OMP_NUM_THREADS", "2")

hypothesis.settings.register_profile("cairn", deadline=None, print_blob=True)
hypothesis.settings.load_profile("cairn")
