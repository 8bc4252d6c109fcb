"""`python -m cairn` is `cairn`."""

from cairn.main import main

main()
