"""The signals that end a peer or a coordinator in order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def stop_on_signals(stop: asyncio.Event) -> None:
    """Set `stop` on Ctrl-C, on a service manager's SIGTERM, and when the terminal closes (SIGHUP).

    A program that was started with SIGHUP ignored (as by nohup) goes on when the terminal closes.
    """
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        return
    terminals = [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]

    def hang_up() -> None:
        # To write to a terminal that has closed is an error, and would keep the rest from being saved.
        with open(os.devnull, "r+b") as nowhere:
            for descriptor in terminals:
                os.dup2(nowhere.fileno(), descriptor)
        stop.set()

    loop.add_signal_handler(signal.SIGHUP, hang_up)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM too, as long as the block lasts, so that it tidies up. In the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
