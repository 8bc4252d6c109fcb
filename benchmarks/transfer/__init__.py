"""Blobs over an emulated internet, beside what the line allows and plain TCP: `python -m benchmarks.transfer`."""
