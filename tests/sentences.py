"""Counts sentences that must be decoded: at least a fifth of their words are pronouns.

A pronoun stands for a noun elsewhere, so a sentence full of pronouns is read twice. Sentences below nine words are not
counted: two pronouns are a fifth of them.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

PRONOUNS = frozenset(
    ("it", "its", "that", "those", "what", "which", "one", "ones", "they", "so", "them", "this", "these", "there",
     "then", "other", "others", "same", "all", "another", "their")
)  # fmt: skip
LEAST_WORDS = 9
DECODED = 0.2  # A sentence with this share of pronouns, or more, must be decoded.
FENCED = re.compile(r"```.*?```", flags=re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", flags=re.DOTALL)
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_MARK = re.compile(r"^ *(?:[-*>]|\d+[.)]) +")
_END = re.compile(r"(?<=[.;:])\s+")


class Sentence(NamedTuple):
    """A sentence of a docstring or a page.

    Attributes:
        share: Pronouns divided by words, 0 to 1.
        place: The file, and in Python the name of the function, class or module.
        text: The sentence in one line.
    """

    share: float
    place: str
    text: str


def of_text(text: str, place: str) -> Iterator[Sentence]:
    """Yield the counted sentences of a text without code blocks; full stop, colon and semicolon end a sentence."""
    for sentence in _END.split(text.replace("\n", " ")):
        words = [word.strip(".,;:()`").lower() for word in sentence.split()]
        if len(words) >= LEAST_WORDS:
            share = sum(word in PRONOUNS for word in words) / len(words)
            yield Sentence(share, place, " ".join(sentence.split()))


def of_docstrings(source: str, place: str) -> Iterator[Sentence]:
    """Yield the counted sentences of a Python source's docstrings."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Module):
            text = FENCED.sub("", ast.get_docstring(node) or "")
            yield from of_text(text, f"{place}:{getattr(node, 'name', 'module')}")


def of_markdown(text: str, place: str) -> Iterator[Sentence]:
    """Yield the counted sentences of a page outside code blocks and tables; headings and list items end a sentence."""
    text = _COMMENT.sub("", FENCED.sub("", text))
    block: list[str] = []
    for line in [*text.splitlines(), ""]:
        is_code = line.startswith("    ") and not block
        is_apart = is_code or not line.strip() or line.lstrip().startswith(("#", "|"))
        if is_apart or _MARK.match(line):
            yield from of_text(_LINK.sub(r"\1", " ".join(block)), place)
            block = []
        if not is_apart:
            block.append(_MARK.sub("", line))


def of_folder(folder: Path) -> Iterator[Sentence]:
    """Yield the counted sentences of all docstrings in a folder's Python sources."""
    for path in sorted(folder.rglob("*.py")):
        yield from of_docstrings(path.read_text(encoding="utf-8"), str(path.relative_to(folder.parent)))


def decoded_share(sentences: list[Sentence]) -> float:
    """Return the share of sentences that must be decoded, 0 to 1; 0 without sentences."""
    return sum(sentence.share >= DECODED for sentence in sentences) / max(1, len(sentences))


def complaint(sentences: list[Sentence], at_most: float) -> str:
    """Return "" if at most the given share must be decoded, else the share and the worst sentences in lines."""
    share = decoded_share(sentences)
    if share <= at_most:
        return ""
    worst = [s for s in sorted(sentences, reverse=True) if s.share >= DECODED][:20]
    lines = [f"{sentence.share:.2f} {sentence.place}: {sentence.text}" for sentence in worst]
    return "\n".join([f"{share:.1%} of {len(sentences)} sentences, allowed: {at_most:.0%}", *lines])
