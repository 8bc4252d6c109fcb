"""One class or function at a time, in this process."""
