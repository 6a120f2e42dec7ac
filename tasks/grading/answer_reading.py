"""Reading: the meaning of an answer's text: a choice, words, a number with a unit, or a formula for math-verify."""

import re
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import lru_cache

from tasks.grading.answer_notation import DRESS, dollar_signs, is_word, letters_of, plain_notation, undressed
from tasks.grading.answer_text import without_boxes
from tasks.grading.answer_units import (
    Unit,
    changes_meaning,
    number_in_words,
    read_unit,
    scale_of,
    without_base,
    without_unit,
)
from tasks.grading.number_size import is_too_large

# More signs of equality than a derivation in a box has.
_EQUATIONS_MAX = 12
_EXPONENT_MAX = 400
_MONTHS = "january february march april may june july august september october november december"
_DATE = re.compile(rf"(?i)\b(?:{'|'.join(_MONTHS.split())})\b")
# Words with which a sentence leads in to its answer.
_LEAD = re.compile(
    r"(?:(?:the|so|thus|hence|therefore|then|and|that|is|are|we|get|have|it|which|equals?|exactly|about|around|roughly|"
    r"approximately|approx|circa|an?\s+total\s+of|in\s+total|(?:final|correct)?\s*answers?|solution|result|value|total|"
    r"final|simply|just|also)(?![\w({])[\s,:.]*)+[:=]?\s*|[:=][:=\s]*|(?:option|choice)\s+(?=\(?[A-J](?!\w))"
    r"|\\(?:approx|simeq|therefore|implies|Rightarrow)(?![A-Za-z])\s*",
    re.IGNORECASE,
)
_CHOICE = re.compile(
    r"(?:\(\s*(?P<round>[A-Ja-h])\s*\)|\[\s*(?P<square>[A-J])\s*\]|(?P<open>[A-J])(?=\s*[.):]))\s*[.):]?"
    r"(?:(?P<space>\s*)(?P<rest>(?<=\s)\S.*|[\d\\$].*))?",
    re.DOTALL,
)
_OPERATOR = re.compile(
    r"[+*/=^_<>|,&]|-(?!\d)|(?:and|or)\b"
    r"|\\(?:cup|cap|times|cdot|le|ge|leq|geq|lt|gt|ne|neq|in|to|div|pm|approx)(?![A-Za-z])"
)
_CURRENCY = re.compile(r"([-+]?)\s*(\\\$|€|£|¥|₹|Rs\.?|USD|EUR|GBP|INR)\s*(?=[-+]?[\d.])")
_DECIMAL = r"[-+]?\s*(?:\d+(?:\.\d*)?|\.\d+)"
_POWER_OF_TEN = r"(?:\s*(?:\\times|\\cdot|\*|x)\s*10\s*\^\s*\{?\s*([-+]?\d+)\s*\}?)"
_NUMBER = re.compile(
    rf"(?:\(\s*(?=[^()]*\)\Z))?(?:({_DECIMAL}){_POWER_OF_TEN}?|([-+]?\s*\d+)\s*/\s*(\d+)"
    r"|([-+]?)\s*\\[dtc]?frac\s*\{\s*([-+]?\d+)\s*\}\s*\{\s*(\d+)\s*\})\s*(\\?%|percent\b|per\s*cent\b)?\)?"
)
_IN_PROSE = re.compile(r"(?<![\w.])[-+]?(?:\d+\s*/\s*\d+|\d+(?:\.\d+)?|\.\d+)(?:\s*\\?%)?(?!\d)")
_FRACTION = re.compile(r"\\[dtc]?frac\{(\d+)\}\{(\d+)\}")
_PROSE = re.compile(r"[\w\s.,;:'\"!?()%/&-]*")
_FUNCTIONS = "and|sin|cos|tan|cot|sec|csc|log|exp|sqrt|mod|max|min|gcd|lcm"
_WORD = re.compile(rf"(?<![\\\w])(?!(?:{_FUNCTIONS})(?!\w))(?:[^\W\d_]{{3,}}|is|was)(?!\w)")
_SPEECH = re.compile(rf"{_WORD.pattern}\s+{_WORD.pattern}")
_COMMAND = re.compile(r"\\(?:begin|end)\{[^{}]*\}|\\[A-Za-z]+")
_UNENDED = re.compile(r"\\(?:boxed|fbox)|</?answer>")
_DOTS = re.compile(r"\\(?:ld|cd|d)ots|\.\.\.")


@dataclass(frozen=True, slots=True)
class Reading:
    """The meaning of a text as an answer.

    Attributes:
        written: The text in plain notation.
        letters: The letters of a text that has nothing but letters; None otherwise.
        is_word: True for an answer in words.
        choice: The letter of a choice.
        formula: The text for math-verify, without unit and base; empty if there is no formula.
        number: The value of a formula that is a plain number; a percentage is divided by 100.
        is_percentage: True if a percent sign or word follows the number.
        unit: The unit of a number.
        base: The base that the number names.
        label: The letters of the words before a number.
        count: The number of values in a list.
        repeats: The number of values in a list that occurred earlier in the list.
        goes_on: True if dots stand for further values or digits.
    """

    written: str
    letters: str | None = None
    is_word: bool = False
    choice: str | None = None
    formula: str = ""
    number: Fraction | None = None
    is_percentage: bool = False
    unit: Unit | None = None
    base: int | None = None
    label: str = ""
    count: int = 1
    repeats: int = 0
    goes_on: bool = False


class NoReading(ValueError):  # noqa: N818 - reads as what happened
    """A text is no answer; the message is the end of a sentence about the text, with the reason."""


@lru_cache(maxsize=4096)
def read(text: str) -> Reading:
    """Read the text of an answer; raises NoReading for a text without an answer, or with an ambiguous answer."""
    if is_too_large(text):
        return Reading(" ".join(text.split()))
    plain = _bare(plain_notation(without_boxes(text)))
    if not plain or not re.search(r"[^\W_]|\\[A-Za-z]|\\\{", plain):
        raise NoReading("is no mathematics")
    if _UNENDED.search(plain):
        raise NoReading("has a box or a tag without an end")
    if plain.count("=") > _EQUATIONS_MAX:
        raise NoReading("is a chain of equations, of which each side may be the answer")
    if is_too_large(plain):
        return Reading(" ".join(plain.split()))
    return _read_choice(plain) or _read_words(plain) or _read_value(plain)


def number_of(text: str) -> tuple[Fraction, bool] | None:
    """The value of a plain number, and whether it is a percentage."""
    found = _NUMBER.fullmatch(text.strip())
    if not found:
        return None
    decimal, exponent, above, below, sign, top, bottom, percent = found.groups()
    if decimal is not None:
        if exponent and abs(int(exponent)) > _EXPONENT_MAX:
            return None
        value = Fraction(decimal.replace(" ", "")) * Fraction(10) ** int(exponent or 0)
    else:
        denominator = int(below or bottom)
        if not denominator:
            return None
        value = Fraction(int((above or top).replace(" ", "")), denominator) * (-1 if sign == "-" else 1)
    return (value / 100 if percent else value), percent is not None


def _read_choice(plain: str) -> Reading | None:
    """A choice by its letter, as in `(B) 4`; None for anything else, such as a product."""
    found = _CHOICE.fullmatch(undressed(plain))
    if not found:
        return None
    letter = found.group("round") or found.group("square") or found.group("open")
    behind = (found.group("rest") or "").strip()
    if _OPERATOR.match(behind) or re.search(r"\([A-J]\)", behind) or (letter.islower() and found.group("space") == ""):
        return None
    letter, rest = letter.upper(), _bare(behind)
    if rest:
        return replace(_read_words(rest) or _read_value(rest), written=plain, choice=letter)
    return Reading(plain, letters=letter.casefold(), choice=letter, formula=letter)


def _read_words(plain: str) -> Reading | None:
    """Words, a number that is written in words, or a date; None for anything else."""
    if _DATE.search(plain) and re.search(r"\d", plain):
        return Reading(plain, letters=_alphanumeric(plain), is_word=True)
    letters = letters_of(plain)
    if letters is None or not is_word(plain):
        return None
    number = number_in_words(plain)
    if number is None:
        return Reading(plain, letters=letters, is_word=True, formula=plain)
    return Reading(plain, letters=letters, is_word=True, formula=str(number), number=Fraction(number))


def _read_value(plain: str) -> Reading:
    text, symbol = _without_currency(plain)
    text, base = without_base(_formula_in_prose(text))
    if _WORD.search(_COMMAND.sub(" ", text)):
        text = _FRACTION.sub(r"\1/\2", text)
    head, tail = without_unit(text)
    if scale_of(tail) > 1 and (scaled := number_of(head)):
        head, tail = _decimal(scaled[0] * scale_of(tail)), re.sub(r"^\W*\w+", "", undressed(tail))
    label = ""
    if _PROSE.fullmatch(head) and _WORD.search(head):
        head, label, tail = _number_in_prose(head, tail)
    if changes_meaning(label, tail):
        raise NoReading("has words that change its number")
    if _SPEECH.search(_COMMAND.sub("|", DRESS.sub("|", head))):
        raise NoReading("is prose with a formula")
    number, values = number_of(head), _values(head)
    return Reading(
        plain,
        letters=letters_of(plain),
        choice=plain if re.fullmatch("[A-J]", plain) else None,
        formula=head,
        number=number[0] if number else None,
        is_percentage=bool(number and number[1]),
        unit=read_unit(tail, symbol),
        base=base,
        label=_alphanumeric(label),
        count=len(values),
        repeats=len(values) - len(set(values)),
        goes_on=_DOTS.search(head) is not None,
    )


def _bare(text: str) -> str:
    """Strip Markdown, enclosing dollar signs, leading words such as "the answer is", and final points."""
    previous = None
    while previous != text:
        previous = text
        text = re.sub(r"^_+(.*[^_])_+$", r"\1", text.strip().lstrip("#").strip("*` "))
        text = re.sub(r"(?<![.\\])[.,;:]+\Z", "", text).strip()
        enclosed = re.fullmatch(r"(\$\$?)((?:\\.|[^$\\])*)\1", text, re.DOTALL)
        text = enclosed.group(2) if enclosed else text
        whole = re.fullmatch(r"\\(?:text|textbf|textrm|mathrm|mathbf|mbox)\s*\{([^{}]*)\}", text)
        text = whole.group(1) if whole else text
        text = re.sub(r"(?i)\b(?:negative|minus)\s+(?=\d)", "-", text)
        dressed = re.match(r"\\(?:text|textbf|mathrm|mbox)\s*\{([^{}]*)\}", text)
        lead = dressed if dressed and _LEAD.fullmatch(dressed.group(1)) else _LEAD.match(text)
        text = text[lead.end() :] if lead and text[lead.end() :].strip() else text
    return text


def _without_currency(text: str) -> tuple[str, str]:
    """Return the text without currency signs before numbers, and the first sign; a dollar sign may open mathematics."""
    opens = [re.match(r"\s*[-+]?[\d.]", part) is not None for part in text.split("$")[1:]]
    if dollar_signs(text) % 2 or (all(opens) and not re.search(r"[^\s(+-]\$", text)):
        text = re.sub(r"(?<!\\)\$", r"\\$", text)
    found = _CURRENCY.search(text)
    return (_CURRENCY.sub(r"\1", text), found.group(2)) if found else (text, "")


def _formula_in_prose(text: str) -> str:
    """The only formula between dollar signs with the words after the formula; a text without dollar signs as given."""
    if not dollar_signs(text):
        return text
    parts = re.split(r"(?<!\\)\$\$?", text)
    formulas, words = parts[1::2], parts[0::2]
    if len(formulas) == len(words):
        raise NoReading("has mathematics without an end")
    if len(formulas) == 1:
        if changes_meaning(words[0], words[1]):
            raise NoReading("has words that change its formula")
        behind = "" if re.search(r"\d", words[1]) else words[1].strip()
        return f"{formulas[0].strip()} {behind}".strip()
    if all(re.fullmatch(r"\s*(?:,|;|,?\s*and|,?\s*or)\s*", between) for between in words[1:-1]):
        return ", ".join(formulas)
    raise NoReading("has several formulas in prose")


def _number_in_prose(text: str, tail: str) -> tuple[str, str, str]:
    """Split a sentence with a single number into the number, the words before, and the words after."""
    numbers = list(_IN_PROSE.finditer(text))
    if len(numbers) != 1:
        raise NoReading("is prose with several numbers" if numbers else "is prose without a number")
    number = numbers[0]
    return number.group(), text[: number.start()], f"{text[number.end() :]} {tail}".strip()


def _values(formula: str) -> list[Fraction | str]:
    """The values of a list: items between commas or semicolons, at the top level or in the braces of a set."""
    text = re.sub(r"^[A-Za-z]\w*\s*=\s*", "", formula.strip())
    inside = re.fullmatch(r"(?:\\left)?\s*\\?\{(.*?)(?:\\right)?\s*\\?\}", text, re.DOTALL)
    text = re.sub(r",?\s*(?:\\text\s*\{\s*(?:and|or)\s*\}|\b(?:and|or)\b)", ",", inside.group(1) if inside else text)
    values, depth = [""], 0
    for sign in text:
        depth += (sign in "([{") - (sign in ")]}")
        if sign in ",;" and depth == 0:
            values.append("")
        else:
            values[-1] += sign
    return [found[0] if (found := number_of(value)) else value.strip() for value in values]


def _decimal(value: Fraction) -> str:
    return str(value.numerator) if value.denominator == 1 else f"{value.numerator}/{value.denominator}"


def _alphanumeric(text: str) -> str:
    return "".join(filter(str.isalnum, undressed(text))).casefold()
