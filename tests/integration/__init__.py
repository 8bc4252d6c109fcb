"""Real processes, sockets and servers on this machine."""
