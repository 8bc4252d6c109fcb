"""Tests, each named for the promise that it holds. Shared values (`specs`) live here; nothing here is installed."""
