"""The gain of hostile peers, and the cost of audits to honest ones: `python -m benchmarks.adversaries`."""
