"""The coordinator under load: `python -m benchmarks.coordinator`."""
