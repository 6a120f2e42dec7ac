"""Lists and mappings written as text: in JSON, or as Python and NumPy print them.

Such text points to a column that was converted to text by accident.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

CHARACTERS_MAX = 1_000_000
_BRACKETS = {"[": "]", "{": "}"}
_CONVERSATIONS = ("messages", "prompt", "conversations")
# What an item of a conversation has: a message as transformers or ShareGPT have it, or a part of a message.
_ITEMS = (("role", "content"), ("from", "value"), ("type", "text"))


def read_value(text: str) -> Any:
    """The list or mapping that the whole of `text` spells; None for any other text."""
    written = text.strip() if text[:1].isspace() or text[-1:].isspace() else text
    if not written or _BRACKETS.get(written[0]) != written[-1] or len(written) > CHARACTERS_MAX:
        return None
    try:
        return json.loads(written)
    except (ValueError, RecursionError):
        pass
    try:
        # NumPy prints no comma between items.
        return ast.literal_eval(re.sub(r"\}\s+\{", "}, {", written))
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def holds_messages(text: str) -> bool:
    """Whether `text` is a written conversation: a list of messages, one message, or a mapping with such a list."""
    # Almost every text ends here.
    if not any(f"{quote}{name}{quote}" in text for name, _ in _ITEMS for quote in "\"'"):
        return False
    value = read_value(text)
    if isinstance(value, Mapping) and not _is_message(value):
        value = next((value[name] for name in _CONVERSATIONS if name in value), None)
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(_is_message(item) for item in items)


def _is_message(value: Any) -> bool:
    return isinstance(value, Mapping) and any(value.keys() >= set(names) for names in _ITEMS)
