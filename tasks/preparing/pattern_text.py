"""The texts that a regular expression spells: with escapes, alternatives, optional letters and sets of letters."""

import re
from collections.abc import Collection, Iterable, Iterator

# The standard library's own reading of an expression; there is no public one.
from re import _constants, _parser  # type: ignore[attr-defined]
from typing import Any

# A set of more letters does not spell any of them.
_LETTERS_MAX = 4
_REPEATS = (_constants.MAX_REPEAT, _constants.MIN_REPEAT, _constants.POSSESSIVE_REPEAT)
_LOOKS = (_constants.ASSERT, _constants.ASSERT_NOT)


def spelt(pattern: str, texts: Collection[str]) -> list[str]:
    """The texts whose characters stand in order along some way through the expression.

    An item that matches almost any character, such as "." or [^<], spells no text. A literal occurrence of a text in
    the pattern counts, too, even with a "|" of a different meaning. Raises re.error.
    """
    parsed = _parser.parse(pattern, re.DOTALL)
    ignores_case = bool(parsed.state.flags & re.IGNORECASE)
    return [text for text in texts if text in pattern or _Speller(text, ignores_case=ignores_case).finds(parsed)]


class _Speller:
    """Follows the expression with the set of possible numbers of characters spelt so far."""

    def __init__(self, text: str, *, ignores_case: bool) -> None:
        self._text = text
        self._ignores_case = ignores_case
        self._found = False

    def finds(self, parsed: Iterable[Any]) -> bool:
        self._after(parsed, frozenset({0}))
        return self._found

    def _after(self, parsed: Iterable[Any], spelt: frozenset[int]) -> frozenset[int]:
        for kind, argument in parsed:
            # The text may begin anywhere.
            spelt = self._after_one(kind, argument, spelt | {0})
            self._found = self._found or len(self._text) in spelt
        return spelt

    def _after_one(self, kind: Any, argument: Any, spelt: frozenset[int]) -> frozenset[int]:
        if kind is _constants.AT:
            return spelt
        if kind in _LOOKS:
            # A look-around takes no character, and spells its inner expression.
            self._after(argument[1], spelt)
            return spelt
        if kind in _REPEATS:
            return self._repeated(argument, spelt)
        branches = list(_branches(kind, argument))
        if branches:
            return frozenset().union(*(self._after(branch, spelt) for branch in branches))
        letters = _letters(kind, argument)
        return frozenset(at + 1 for at in spelt if any(self._is_at(at, letter) for letter in letters))

    def _repeated(self, argument: Any, spelt: frozenset[int]) -> frozenset[int]:
        least, most, inner = argument
        seen, reached = spelt, spelt if least == 0 else frozenset()
        for _ in range(int(most)):
            spelt = self._after(inner, spelt)
            reached |= spelt
            # Another repetition spells nothing new.
            if spelt <= seen:
                break
            seen |= spelt
        return reached

    def _is_at(self, at: int, letter: int) -> bool:
        if at >= len(self._text):
            return False
        here, there = self._text[at], chr(letter)
        return here == there or (self._ignores_case and here.casefold() == there.casefold())


def _branches(kind: Any, argument: Any) -> Iterator[Iterable[Any]]:
    """The alternative inner expressions of an item; none for a character."""
    if kind is _constants.BRANCH:
        yield from argument[1]
    elif kind is _constants.SUBPATTERN:
        yield argument[-1]
    elif kind is _constants.ATOMIC_GROUP:
        yield argument
    elif kind is _constants.GROUPREF_EXISTS:
        yield argument[1]
        yield argument[2] or ()


def _letters(kind: Any, argument: Any) -> list[int]:
    """The characters that an item spells; [] for an item that matches many characters."""
    if kind is _constants.LITERAL:
        return [argument]
    if kind is not _constants.IN:
        return []
    letters: list[int] = []
    for part, value in argument:
        if part is _constants.LITERAL:
            letters.append(value)
        elif part is _constants.RANGE and value[1] - value[0] < _LETTERS_MAX:
            letters += range(value[0], value[1] + 1)
        else:
            return []
    return letters if len(letters) <= _LETTERS_MAX else []
