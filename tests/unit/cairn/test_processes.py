"""The ports of the demo's processes."""

from __future__ import annotations

import socket
from pathlib import Path

from cairn.demo.processes import FIRST_PORT, free_ports

RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")


def test_free_ports_can_be_listened_on_and_are_given_to_no_outgoing_connection():
    first = int(RANGE.read_text().split()[0]) if RANGE.exists() else 32_768
    ports = free_ports(20)
    assert len(set(ports)) == 20 and all(FIRST_PORT <= port < first for port in ports)
    for port in ports:
        with socket.socket() as s:
            s.bind(("127.0.0.1", port))
