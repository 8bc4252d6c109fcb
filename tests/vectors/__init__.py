"""Test vectors of the protocol (docs/vectors): made by `python -m tests.vectors`, checked against a second reader."""
