"""How far something long is: what takes long calls a `Tell`, and knows nothing of terminals."""

from collections.abc import Callable

# (what is done now, how much of it is done, out of how much; 0: not known).
Tell = Callable[[str, int, int], None]


def untold(what: str, done: int, total: int) -> None:
    """A Tell that shows nothing."""
