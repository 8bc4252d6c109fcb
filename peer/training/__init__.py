"""The trainer: the process that owns the model and the device, and speaks only with its node.

`service` is its loop, `front` the thread beside it that does what others wait for, `gate` where a step stands aside for
that, `trainer` what the messages do, `inner` the optimiser's steps, `outer` the pseudo-gradient's
side, `claims` the count of windows, `saved` what survives a restart, `data` the reader of windows. It opens no port,
knows no peer but itself, and holds no private key. Importing this package is cheap: torch and transformers come with
its modules.
"""
