"""The rival: bytes over plain TCP sockets, one to each donor.

python -m benchmarks.transfer.plain serve BYTES         sends BYTES to each client, until it is killed
python -m benchmarks.transfer.plain take ADDRESS...     prints the seconds until all have sent theirs
"""

from __future__ import annotations

import socket
import sys
import threading
import time

PORT = 7301
BLOCK = bytes(1 << 18)


def send(connection: socket.socket, size: int) -> None:
    with connection:
        while size:
            size -= connection.send(BLOCK[: min(size, len(BLOCK))])


def serve(size: int) -> None:
    listener = socket.create_server(("0.0.0.0", PORT))
    print("ready", flush=True)
    while True:
        threading.Thread(target=send, args=(listener.accept()[0], size), daemon=True).start()


def take(address: str) -> None:
    buffer = bytearray(1 << 20)
    with socket.create_connection((address, PORT), timeout=60) as connection:
        while connection.recv_into(buffer):
            pass


def take_all(addresses: list[str]) -> float:
    began = time.monotonic()
    threads = [threading.Thread(target=take, args=(a,)) for a in addresses]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.monotonic() - began


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(int(sys.argv[2]))
    else:
        print(take_all(sys.argv[2:]))
