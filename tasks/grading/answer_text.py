r"""The text of an answer: which part of a completion or a ground truth states it, and how it is written.

Pure functions of text; `math_answer` compares what they return.
"""

import math
import re

# A number of more digits is never computed: comparing with it takes the whole time limit of a response.
DIGITS_MAX = 4_000
_THINKING = re.compile(r"<think>.*", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s${}]++)(?!\{)")
# LaTeX's ways to set thousands apart, between a digit and three more.
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;:!> ]|~|\{,\})\s*(?=\d{3}(?!\d))")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
_COMMA = re.compile(r"(?<=\d),(?=\d)")
# A number at the beginning of the line of an answer, and after it the words of a sentence.
_STATED = re.compile(
    r"([-+]?[$€£¥]?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?)"
    r"(?:[.,;:!]?\s+[(\u2013\u2014-]*\s*(?!or\b|and\b)[^\W\d_]{2}|[.;!]?$)"
)
_DRESS = re.compile(
    r"\\(?:text|textbf|textit|textrm|mathrm|mathbf|mathit|mathsf|operatorname|mbox|emph)\s*\{([^{}]*)\}"
)
_LETTERS = re.compile(r"[^\W\d_]+(?:[\s,.'\u2019-]+[^\W\d_]+)*[\s.]*")
_NUMBER = re.compile(r"(\d+)(?:\.\d+)?")
_DOLLAR = re.compile(r"(?<!\\)(?:\\\\)*\$")
_POWER = re.compile(r"\^|\*\*|!")


def dollar_signs(text: str) -> int:
    r"""How many dollar signs in `text` open or close mathematics, unlike `\$`, which is money."""
    return len(_DOLLAR.findall(text))


def without_dollar_signs(text: str) -> str:
    r"""The same without dollar signs, those of money too."""
    return text.replace("\\$", "").replace("$", "")


def outside_thinking(completion: str) -> str:
    """What follows the last `</think>`, without a thought that begins after it and has no end."""
    return _THINKING.sub("", completion.rpartition("</think>")[2])


def plain_notation(text: str) -> str:
    r"""The same with `\boxed` for every box, without space in thousands, and with commas as English writes them.

    `1\,000` becomes `1000`, and `1,22`, which is no number in English, becomes the list `1, 22`; `1,220` stays.
    """
    text = _BARE_BOX.sub(lambda box: f"\\boxed{{{box.group(1).rstrip('.,;')}}}", text)
    text = _THIN_SPACE.sub("", _BOX.sub(r"\\boxed", text))
    pieces, end = [], 0
    for number in _THOUSANDS.finditer(text):
        pieces += [_COMMA.sub(", ", text[end : number.start()]), number.group()]
        end = number.end()
    return "".join(pieces) + _COMMA.sub(", ", text[end:])


def after_marker(text: str) -> str:
    """The answer that GSM8K's marker "####" states: the rest of the line after the last one; all of a text without.

    If the line begins with a number that words follow, the answer is the number.
    """
    if "####" not in text:
        return text
    lines = text.rpartition("####")[2].strip().splitlines()
    line = lines[0].strip("*_` \t") if lines else ""
    stated = _STATED.match(line)
    return stated.group(1) if stated else line


def without_space_in_numbers(line: str) -> str:
    """The same with `1 234` as `1234`, and `1 22` as the list `1, 22`."""
    return re.sub(r"(?<=\d)\s+(?=[\d.])", ", ", re.sub(r"(?<=\d) (?=\d{3}(?!\d))", "", line))


def is_prose(line: str) -> bool:
    """Whether the line of an answer is a sentence about it, or says itself which part of it is mathematics."""
    if re.match(r"[-+]?\.?\d", line):
        return False
    return dollar_signs(line) > 0 or re.search(r"(?<![\\\w])[^\W\d_]{2}", _DRESS.sub("", line)) is not None


def box_contents(text: str) -> list[str]:
    r"""What stands in each `\boxed{}`, in order; a box without an end goes to the end of the text."""
    contents, start = [], text.find("\\boxed{")
    while start >= 0:
        begin = start + len("\\boxed{")
        end = _closing(text, begin)
        contents.append(text[begin:end])
        start = text.find("\\boxed{", begin)
    return contents


def letters_of(answer: str) -> str | None:
    r"""The letters of an answer in words, without `\text{}` and case; None for an answer with anything but letters.

    Mathematics reads a word as the product of its letters, so to it all anagrams are equal.
    """
    bare = _DRESS.sub(r" \1 ", without_dollar_signs(answer)).replace("\\ ", " ").replace("~", " ").strip()
    return "".join(filter(str.isalpha, bare)).casefold() if _LETTERS.fullmatch(bare) else None


def is_word(answer: str) -> bool:
    """Whether an answer is in words: nothing but letters, and two of them are adjacent."""
    return letters_of(answer) is not None and re.search(r"[^\W\d_]{2}", _DRESS.sub(r" \1 ", answer)) is not None


def is_too_large(text: str) -> bool:
    """Whether a power, factorial or binomial coefficient in `text` may have more than DIGITS_MAX digits.

    It estimates from above. It takes the numbers of a base, an exponent or an argument for factors of a product.
    """
    flat = re.sub(r"\\left|\\right|\\cdot|\\times|(?<=\d),(?=\d{3})|\s+", "", text)
    if re.search(r"binom|choose", flat) and re.search(r"\d{6}|\d\^", flat):
        return True
    try:
        _digits_of_product(flat)
    except (OverflowError, RecursionError):
        return True
    return False


def _closing(text: str, begin: int) -> int:
    """The index of the brace that closes the group whose content begins at `begin`; the text's end without one."""
    depth, index = 1, begin
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return index
        index += 1
    return len(text)


class _TooLargeError(OverflowError):
    """A number has more than DIGITS_MAX digits."""


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
    """The index of the bracket that closes the one at `index`, whatever its kind; the text's end without one."""
    depth = 0
    for place in range(index, len(text)):
        depth += (text[place] in "{([") - (text[place] in "})]")
        if not depth:
            return place
    return len(text)
