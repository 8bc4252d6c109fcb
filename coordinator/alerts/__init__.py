"""Alerts for the operator: rules over what the coordinator sees, and webhooks that receive events.

`rules` are pure functions from an `AlertInput` to a message. `tracker` decides when a message becomes an alert: when it
fires, while it lasts, and when it is resolved; its state survives a restart. `webhooks` delivers events, `config` says
to which addresses, and `watcher` adds the clock and the disk.
"""
