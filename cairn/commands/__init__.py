"""Commands of `cairn` in modules of their own, registered in `main`."""
