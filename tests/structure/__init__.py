"""How the repository is built: imports, stubs, packages."""
