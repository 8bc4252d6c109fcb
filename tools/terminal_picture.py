"""Make a picture of a terminal from its text with ANSI colours on stdin, such as that of tmux.

    tmux new-session -d -s cairn -x 110 -y 16 'cairn peer join INVITE --name ada'
    tmux capture-pane -e -p -t cairn | python -m tools.terminal_picture docs/terminal.svg "cairn peer join INVITE"

The picture loads no font from elsewhere.
"""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text


def picture(screen: str, title: str) -> str:
    """Return an SVG of the screen, without the empty lines at its end."""
    lines = [Text.from_ansi(line) for line in screen.rstrip().split("\n")]
    console = Console(record=True, width=max(len(line) for line in lines), file=io.StringIO())
    for line in lines:
        console.print(line, no_wrap=True, crop=True)
    svg = re.sub(r"@font-face \{.*?\}\s*", "", console.export_svg(title=title), flags=re.S)
    return svg.replace("Fira Code, monospace", "monospace")


if __name__ == "__main__":
    place, title = sys.argv[1:]
    Path(place).write_text(picture(sys.stdin.read(), title))
