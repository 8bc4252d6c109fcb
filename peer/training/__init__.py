"""The trainer: the process that owns the model and the device, and communicates only with its node.

`service` is the loop of the thread that trains, `request_handler` the thread that answers what peers wait for.
`step_loop` and `base_state` are the state of each, `exchange_point` the lock between them, and `trainer` puts them
together. It opens no port, knows no peer but itself, and holds no private key. To import this package is cheap: torch
and transformers come with its modules.
"""
