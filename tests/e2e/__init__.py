"""End-to-end tests: a coordinator and peers as real processes on loopback, killed, stopped, lied to and started again.

`world` makes a tiny run and keeps its processes, `chains` reads what is on their disks, `stranger` is a peer of the
test's own, honest or not. Nothing here reaches into the processes: what is looked at are their logs, files and answers.
"""
