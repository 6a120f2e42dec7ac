"""A reward for demonstrations with an engine that has no model: it differs between responses, and means nothing."""

from collections.abc import Sequence
from typing import Any


def even_share(completions: Sequence[str], **_: Any) -> list[float]:
    """The share of characters with an even code, of each response."""
    return [sum(ord(each) % 2 == 0 for each in text) / max(1, len(text)) for text in completions]
