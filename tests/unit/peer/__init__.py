"""Tests of peer, one class or function at a time."""
