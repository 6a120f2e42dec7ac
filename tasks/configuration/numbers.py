"""Numbers in a document: floats that were written as text, and integers that came as floats.

Flyte carries what its console and flytectl send as a protobuf Struct, whose numbers are all floats: 7 arrives as 7.0.
So a whole float is an integer here, also in mappings whose fields are free; a field of the type float makes it a float
again.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from resources.documents import EXPONENT, exact_float

# Below, every integer is a float of its own.
EXACT_BELOW = 1 << 53


def integers_restored(document: Any) -> Any:
    """The document with integers in place of whole floats."""
    if isinstance(document, Mapping):
        return {name: integers_restored(value) for name, value in document.items()}
    if isinstance(document, list | tuple):
        return [integers_restored(value) for value in document]
    if isinstance(document, float) and document.is_integer() and abs(document) < EXACT_BELOW:
        return int(document)
    return document


def rounded_integers(document: Any) -> Iterator[str]:
    """A problem for each number of a document with floats alone that may be an integer, and then was rounded."""
    numbers = list(_numbers(document))
    if any(isinstance(number, int) for _, number in numbers):
        return
    for path, number in numbers:
        if isinstance(number, float) and number.is_integer() and abs(number) >= EXACT_BELOW:
            yield (
                f"{path}: {number} given; allowed in a document whose numbers are all floats, as Flyte's console and "
                f"flytectl send them: below 2^53 ({EXACT_BELOW}), because larger integers are rounded there"
            )


def _numbers(document: Any, path: str = "") -> Iterator[tuple[str, int | float]]:
    """The path and the value of each number."""
    if isinstance(document, Mapping | list | tuple):
        items = document.items() if isinstance(document, Mapping) else enumerate(document)
        for name, value in items:
            yield from _numbers(value, f"{path}.{name}".lstrip("."))
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield path, document


def float_in(text: object) -> float | None:
    """The number in text such as "1e-6", which YAML 1.1 reads as text; None if it is none, or beyond the range."""
    try:
        return exact_float(text) if isinstance(text, str) and EXPONENT.fullmatch(text) else None
    except ValueError:
        return None
