"""Fixtures, worlds and fakes that tests share."""
