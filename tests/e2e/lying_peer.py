"""A peer whose trainer lies: `cairn peer join`, with `tests.e2e.lying_trainer` in the trainer's place."""

from __future__ import annotations

import sys
from functools import partial

from cairn.commands import join
from cairn.main import main

if __name__ == "__main__":
    command = (sys.executable, "-m", "tests.e2e.lying_trainer")
    # The command line has no option for it.
    join.JoinOptions = partial(join.JoinOptions, trainer_command=command)  # type: ignore[misc]
    main(prog_name="cairn")
