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
    terminals = _terminals()

    def hang_up() -> None:
        _replace(terminals)
        stop.set()

    loop.add_signal_handler(signal.SIGHUP, hang_up)


def _terminals() -> list[int]:
    return [descriptor for descriptor in (0, 1, 2) if os.isatty(descriptor)]


def _replace(terminals: list[int]) -> None:
    """Replace terminals that have closed: to write to one is an error, and would keep the rest from being saved."""
    with open(os.devnull, "r+b") as nowhere:
        for descriptor in terminals:
            os.dup2(nowhere.fileno(), descriptor)


@contextmanager
def sigterm_as_ctrl_c() -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM and SIGHUP too, as long as the block lasts, so that it tidies up.

    In the main thread. SIGHUP stays ignored where it is (as by nohup).
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    terminals = _terminals()

    def hang_up(*_: object) -> None:
        _replace(terminals)
        raise KeyboardInterrupt

    before = {signal.SIGTERM: signal.signal(signal.SIGTERM, signal.default_int_handler)}
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        before[signal.SIGHUP] = signal.signal(signal.SIGHUP, hang_up)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
