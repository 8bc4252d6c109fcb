"""The checks of this machine, its links and its clock for one run: `cairn peer doctor`, and before `cairn peer join`.

A check is a pure function of measurements and of the run's spec, and returns a `DoctorFinding`. `join` makes the quick
ones (`peer.node.machine_check`, and the clock) and raises the first that says no. The doctor makes all and lists them.

- `findings`: a finding, and what several say together
- `measurements`: measurements, as plain values
- `clock`, `disk`, `device`, `pace`, `links`: the findings
- `device_process`, `probes`: how they are made
"""
