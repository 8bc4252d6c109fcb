"""Tells the operator when something is wrong: rules over what the coordinator sees, and webhooks that hear of it.

`rules` are pure: what is seen goes in, words come out. `journal` decides when words become an alert: once when it
fires, again while it lasts, once when it is over; what it knows is kept over a restart. `hooks` tells it, `config` says
whom. `watcher` is the shell with the clock.
"""
