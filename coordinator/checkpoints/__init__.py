"""A run's checkpoints: archive, retention, finalizations, copies, evaluations, and verification by strangers.

Reading order: `archive`, `retention`, `verification`, `archiver`; `job` runs work in a process of its own.
"""
