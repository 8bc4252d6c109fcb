"""The trainer's end of the channel, which blocks. One thread receives; any may send."""

from __future__ import annotations

import select
import socket
import threading
import time

from peer.channel.messages import MAX_LINE, FromTrainer, Progress, ToTrainer, from_line, to_line
from peer.errors import ChannelError
from protocol.errors import os_reason

SEND_SECONDS = 60.0
"""Maximum time to send a message: a node that reads nothing for longer is gone or stuck, and the trainer ends."""

_CLOSED = "the node closed the channel"
_READ = 1 << 16


def _broken(error: OSError) -> ChannelError:
    """Return what a failed call means: a node that closes its end may be noticed while a message is being sent."""
    gone = isinstance(error, (BrokenPipeError, ConnectionResetError))
    return ChannelError(_CLOSED if gone else f"the channel to the node broke ({os_reason(error)})")


class TrainerEnd:
    """Messages from and to the node, over a connected stream socket that this object owns."""

    def __init__(self, connection: socket.socket):
        connection.setblocking(False)
        self._socket = connection
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(connection, select.POLLIN)
        self._writable.register(connection, select.POLLOUT)
        self._sending = threading.Lock()
        self._buffer = bytearray()
        self._scanned = 0
        self._closed = False

    @classmethod
    def from_fd(cls, fd: int) -> TrainerEnd:
        """Return the end whose descriptor this process inherited. Raises ChannelError when it is no socket."""
        try:
            return cls(socket.socket(fileno=fd))
        except OSError as e:
            raise ChannelError(f"descriptor {fd} is not the channel to a node ({os_reason(e)})") from None

    def receive(self, seconds: float | None) -> ToTrainer | None:
        """Return the next message, or None when none came in this time (None: no limit, 0: do not wait).

        Raises ChannelError when the node closed the channel, or sent something that is no message to a trainer.
        """
        deadline = None if seconds is None else time.monotonic() + seconds
        while True:
            end = self._buffer.find(b"\n", self._scanned)
            if end >= 0:
                line = bytes(self._buffer[:end])
                del self._buffer[: end + 1]
                self._scanned = 0
                message = from_line(line)
                if not isinstance(message, ToTrainer):
                    raise ChannelError(f"a {type(message).__name__} message is not for the trainer")
                return message
            self._scanned = len(self._buffer)
            if len(self._buffer) > MAX_LINE:
                raise ChannelError(f"a line of more than {MAX_LINE} bytes on the channel")
            if self._closed:
                raise ChannelError(_CLOSED)
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            if not self._readable.poll(None if left is None else 1000 * left):
                return None
            self._read()

    def _read(self) -> None:
        try:
            data = self._socket.recv(_READ)
        except (BlockingIOError, InterruptedError):
            return
        except OSError as e:
            raise _broken(e) from None
        if data:
            self._buffer += data
        else:
            self._closed = True

    def send(self, message: FromTrainer) -> None:
        """Send a message. Progress is dropped when the node is behind; the next one supersedes it.

        Raises ChannelError when the node is gone, or does not read for SEND_SECONDS.
        """
        line = to_line(message)
        with self._sending:
            if not isinstance(message, Progress) or self._writable.poll(0):
                self._write(line)

    def _write(self, line: bytes) -> None:
        left = memoryview(line)
        deadline = time.monotonic() + SEND_SECONDS
        while left:
            try:
                left = left[self._socket.send(left) :]
            except (BlockingIOError, InterruptedError):
                if not self._writable.poll(max(0.0, 1000 * (deadline - time.monotonic()))):
                    raise ChannelError(f"the node read nothing for {SEND_SECONDS:.0f} s") from None
            except OSError as e:
                raise _broken(e) from None

    def close(self) -> None:
        self._socket.close()
