"""One round's exchange between real processes on an emulated internet: Cairn's, and its rivals', on the same hosts."""
