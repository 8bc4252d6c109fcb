"""Tests of protocol, one class or function at a time."""
