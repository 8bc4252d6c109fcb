"""Tests of coordinator, one class or function at a time."""
