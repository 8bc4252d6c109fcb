"""Tests of rounds, one class or function at a time."""
