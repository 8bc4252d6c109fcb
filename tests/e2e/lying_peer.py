"""A peer whose trainer lies: `cairn peer join`, with `tests.e2e.lying_trainer` in the trainer's place."""

from __future__ import annotations

import sys
from functools import partial

from cairn.main import main
from peer.node import options

if __name__ == "__main__":
    command = (sys.executable, "-m", "tests.e2e.lying_trainer")
    # The command line has no option for it. It reads the class when it joins.
    options.NodeOptions = partial(options.NodeOptions, trainer_command=command)  # type: ignore[misc]
    main(prog_name="cairn")
