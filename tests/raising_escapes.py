"""A module of a user that cannot be loaded, and whose reason would clear a terminal."""

raise RuntimeError("\x1b[2J\x9b31m")
