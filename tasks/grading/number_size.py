"""The size of numbers: whether an answer would take too long to compute, estimated from its text alone."""

import math
import re

# A number of more digits is never computed: comparing with it takes the whole time limit of a response.
DIGITS_MAX = 4_000
# The same for a sum or product of more terms, for a matrix of more entries, and for a text of more characters.
TERMS_MAX = 10_000
ENTRIES_MAX = 100
LENGTH_MAX = 2_000
_NUMBER = re.compile(r"(\d+)(?:\.\d+)?")
_POWER = re.compile(r"\^|\*\*|!")
_SCIENTIFIC = re.compile(r"\d[eE][-+]?(\d+)")
_RANGE = re.compile(r"\\(?:sum|prod)(?:\\(?:no)?limits)?(?=[_^])")


def is_too_large(text: str) -> bool:
    """Whether `text` may have more than DIGITS_MAX digits, TERMS_MAX terms, ENTRIES_MAX entries or LENGTH_MAX letters.

    An improper integral is too large, too. Powers, factorials and binomial coefficients are estimated from above: all
    numbers within a base, an exponent or an argument count as factors of a product.
    """
    if "\\int" in text and "\\infty" in text:
        return True
    if len(text) > LENGTH_MAX or ("\\begin" in text and text.count("&") + text.count("\\\\") >= ENTRIES_MAX):
        return True
    if any(len(exponent) > 9 or int(exponent) > DIGITS_MAX for exponent in _SCIENTIFIC.findall(text)):
        return True
    flat = re.sub(r"\\left|\\right|\\cdot|\\times|(?<=\d),(?=\d{3})|\s+", "", text)
    if re.search(r"binom|choose", flat) and re.search(r"\d{6}|\d\^", flat):
        return True
    try:
        _digits_of_product(flat)
        return sum(_digits_of_range(flat, found.end()) for found in _RANGE.finditer(flat)) > math.log10(TERMS_MAX)
    except (OverflowError, RecursionError):
        return True


class _TooLargeError(OverflowError):
    """A number has more than DIGITS_MAX digits."""


def _digits_of_range(text: str, index: int) -> float:
    """The decimal logarithm of the upper bound of a sum or product whose bounds begin at `index`."""
    digits = 0.0
    while text[index : index + 1] in ("_", "^"):
        is_upper = text[index] == "^"
        bound, index = _atom(text, index + 1)
        digits = bound if is_upper else digits
    return digits


def _digits_of_product(text: str) -> float:
    """An upper estimate of the decimal logarithm of the product of the numbers in `text`."""
    total, index = 0.0, 0
    while index < len(text):
        digits, index = _factor(text, index)
        total += digits
    return total


def _factor(text: str, index: int) -> tuple[float, int]:
    """The digits of the number, group or sign at `index`, with its powers and factorials, and the index after it."""
    if text[index] == "_":  # the bounds of a sum are no powers
        _, index = _atom(text, index + 1)
        if text[index : index + 1] == "^":
            _, index = _factor(text, index + 1) if index + 1 < len(text) else (0.0, index + 1)
        return 0.0, index
    digits, index = _atom(text, index)
    while index < len(text) and (power := _POWER.match(text, index)):
        index = power.end()
        if power.group() == "!":
            argument = 10.0**digits
            digits = math.lgamma(argument + 1) / math.log(10)
        elif index < len(text):
            exponent, index = _factor(text, index)
            digits = max(digits, 1.0) * 10.0**exponent
        if digits > DIGITS_MAX:
            raise _TooLargeError
    return digits, index


def _atom(text: str, index: int) -> tuple[float, int]:
    number = _NUMBER.match(text, index)
    if number:
        whole = len(number.group(1))
        if whole > DIGITS_MAX:
            raise _TooLargeError
        return math.log10(max(1.0, float(number.group()))) if whole < 300 else float(whole), number.end()
    if text[index : index + 1] in ("{", "(", "["):
        close = _group_end(text, index)
        return _digits_of_product(text[index + 1 : close]), close + 1
    return 0.0, index + 1


def _group_end(text: str, index: int) -> int:
    """The index of the bracket, of any kind, that closes the bracket at `index`; the text's end without one."""
    depth = 0
    for place in range(index, len(text)):
        depth += (text[place] in "{([") - (text[place] in "})]")
        if not depth:
            return place
    return len(text)
