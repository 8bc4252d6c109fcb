"""Tests of benchmarks, one class or function at a time."""
