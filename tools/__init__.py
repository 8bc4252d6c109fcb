"""Checks of this repository that no published linter has."""
