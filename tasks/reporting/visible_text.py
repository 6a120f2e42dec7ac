"""Text that a model or a data set wrote, made safe to show in a terminal or on a page: nothing in it is interpreted."""

import re

# Control characters but line feed and tab; what changes the direction of the text around it; halves of characters.
HIDDEN = re.compile("[\0-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def visible(text: str) -> str:
    r"""The text with every control character written out, such as \x1b; line feeds and tabs stay."""
    return HIDDEN.sub(lambda found: _written_out(ord(found.group())), text)


def _written_out(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
