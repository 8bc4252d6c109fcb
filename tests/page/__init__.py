"""The page in a real browser, and its API: against a coordinator whose swarm is made by hand."""
