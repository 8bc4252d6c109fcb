"""Garbage and lies from the network."""
