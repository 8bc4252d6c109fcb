"""The signals that end a peer or a coordinator in order."""

from __future__ import annotations

import asyncio
import os
import signal


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
