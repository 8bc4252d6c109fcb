"""A process between the node and libp2p's daemon. It ends the daemon when the node ends, and removes the folder.

Run as `python -I -S watchdog.py NODE_PID FOLDER COMMAND...`. It uses the standard library only, since it starts with
every peer. It has a session of its own: Ctrl-C reaches the node alone, which says goodbye through the running daemon.
"""

from __future__ import annotations

import ctypes
import os
import select
import shutil
import signal
import sys
import time

PR_SET_PDEATHSIG = 1
GRACE_SECONDS = 2.0


def _exit_with_parent(number: int) -> None:
    """Have Linux send this signal when the parent dies. Elsewhere the loop in `main` polls the parent's id."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number, 0, 0, 0)


def main() -> int:
    node, folder, command = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    os.setsid()
    wake_r, wake_w = os.pipe()
    os.set_blocking(wake_w, False)
    signal.set_wakeup_fd(wake_w)
    stop = []
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda n, _: stop.append(n))
    signal.signal(signal.SIGCHLD, lambda *_: None)
    _exit_with_parent(signal.SIGTERM)

    daemon = os.fork()
    if daemon == 0:
        signal.set_wakeup_fd(-1)
        os.close(wake_r)
        os.close(wake_w)
        _exit_with_parent(signal.SIGKILL)
        try:
            os.execv(command[0], command)
        except OSError as e:
            print(f"{command[0]}: {e.strerror}", flush=True)
            os._exit(127)

    # The daemon has these now. Open copies here would hide its end from the node, which reads them to the last line.
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)

    code = None
    while code is None and not stop and os.getppid() == node:
        select.select([wake_r], [], [], 1.0)
        ended, status = os.waitpid(daemon, os.WNOHANG)
        if ended:
            code = os.waitstatus_to_exitcode(status)
    if code is None:
        code = _end(daemon)
    shutil.rmtree(folder, ignore_errors=True)
    return code if code >= 0 else 128 - code


def _end(daemon: int) -> int:
    os.kill(daemon, signal.SIGTERM)
    until = time.monotonic() + GRACE_SECONDS
    while time.monotonic() < until:
        ended, status = os.waitpid(daemon, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(daemon, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(daemon, 0)[1])


if __name__ == "__main__":
    sys.exit(main())
