"""Paths as users write them."""

from pathlib import Path


def expanded(path: str | Path) -> Path:
    """The path with `~` or `~user` replaced by the home directory; raises ValueError if there is no such user."""
    try:
        return Path(path).expanduser()
    except RuntimeError:
        user = Path(path).parts[0]
        raise ValueError(f"path: value {str(path)!r}; allowed: no {user!r}, because it has no home directory") from None
