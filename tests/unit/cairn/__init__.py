"""Tests of cairn, one class or function at a time."""
