"""The share of a text that a rendered text shows, apart from harmless changes by chat templates and tokenizers.

Templates trim, escape and indent contents, and drop earlier reasoning and its switches (/think). Tokenizers compose
accents, and remove blanks beside special tokens.
"""

import html
import json
import re
import unicodedata
from collections.abc import Collection, Sequence

_END_OF_THOUGHT = "</think>"
_SWITCHES = re.compile(r"/(no_)?think\b")
_SHOWN = 0.9
_CHARACTERS_NAMED_MAX = 5


def spoken(role: str, content: str) -> str:
    """The part of a message's content that a chat template is expected to show."""
    if role == "assistant":
        content = content.rpartition(_END_OF_THOUGHT)[2]
    return content.strip()


def missing(contents: Sequence[str], text: str) -> tuple[list[int], str]:
    """The numbers of contents without a place of their own in `text`, and the text without the found contents.

    Long contents are searched first, so that a short content is not found within a longer content.
    """
    absent = []
    for number in sorted(range(len(contents)), key=lambda number: -len(contents[number])):
        content = contents[number]
        start = text.find(content)
        if start < 0:
            absent.append(number)
        elif content:
            text = f"{text[:start]}\0{text[start + len(content) :]}"
    return sorted(absent), text


def shown_share(content: str, text: str) -> float:
    """The share of the content's characters, in whole words, that `text` shows; 1.0 from a share of 0.9 on."""
    content = _SWITCHES.sub("", content)
    blanks = " ".join(html.unescape(text).split())
    for form in (content, *(json.dumps(content, ensure_ascii=how)[1:-1] for how in (False, True))):
        if " ".join(form.split()) in blanks:
            return 1.0
    words = content.split()
    there = set(blanks.replace("\\n", " ").split())
    # A word may touch a token of the template, but a short one is in every text.
    found = sum(len(word) for word in words if word in there or (len(word) > 2 and word in blanks))
    share = found / max(1, sum(map(len, words)))
    return 1.0 if share >= _SHOWN or not words else share


def is_kept(text: str, decoded: str, specials: Collection[str]) -> bool:
    """Whether `decoded`, the text of its tokens, has all of `text` but blanks beside special tokens."""
    if text in decoded:
        return True
    text, decoded = (unicodedata.normalize("NFC", each) for each in (text, decoded))
    between = re.compile("|".join(map(re.escape, sorted(specials, key=len, reverse=True))) or r"\Z")
    place = 0
    for piece in map(str.strip, between.split(text)):
        start = decoded.find(piece, place)
        if start < 0:
            return False
        place = start + len(piece)
    return True


def lost_characters(text: str, decoded: str) -> str:
    """The first characters of `text` that are not in `decoded`, for messages."""
    lost = list(dict.fromkeys(letter for letter in text if letter not in decoded))
    named = ", ".join(map(repr, lost[:_CHARACTERS_NAMED_MAX]))
    return f"{named}{', ...' if len(lost) > _CHARACTERS_NAMED_MAX else ''}" if lost else "blanks, or the order of some"
