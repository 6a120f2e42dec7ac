r"""The notation of an answer: rewrites the many ways to write a number or formula to the one that math-verify reads.

Pure functions of the text of an answer, as found by `answer_text`.
"""

import re
import unicodedata
from collections.abc import Callable
from fractions import Fraction

DRESS = re.compile(
    r"\\(?:text|textbf|textit|textrm|textsf|textnormal|mathrm|mathbf|mathit|mathsf|operatorname|mbox|hbox|emph|bold)"
    r"\s*\{([^{}]*)\}|\{\\(?:bf|rm|it)\s+([^{}]*)\}"
)
_LETTERS = re.compile(r"[^\W\d_]+(?:[\s,.'\u2019-]+[^\W\d_]+)*[\s.]*")
_DOLLAR = re.compile(r"(?<!\\)(?:\\\\)*\$")
_SIGNS = {
    **dict.fromkeys("\u2212\ufe63", "-"),
    **dict.fromkeys("\u00a0\u2007\u2009\u200a\u202f\u205f\u3000\u2002\u2003\u2004\u2005\u2006\u2008", " "),
    **dict.fromkeys("\u200b\u2060\ufeff\u00ad", ""),
    **dict.fromkeys("\u00d7\u2715\u2a2f", r" \times "),
    **dict.fromkeys("\u22c5\u00b7\u2219", r" \cdot "),
    **dict.fromkeys("\u00b0\u00ba", r"^\circ"),
    **dict.fromkeys("\u2264\u2a7d", r" \le "),
    **dict.fromkeys("\u2265\u2a7e", r" \ge "),
    **dict.fromkeys("\u2018\u2019\u02bc", "'"),
    **dict.fromkeys("\u201c\u201d", '"'),
    **dict.fromkeys("\u27e8\u2329", "("),
    **dict.fromkeys("\u27e9\u232a", ")"),
    "\u00f7": r" \div ",
    "\u2044": "/",
    "\u2215": "/",
    "\u03c0": r"\pi ",
    "\u221e": r"\infty ",
    "\u2260": r" \ne ",
    "\u2205": r"\emptyset ",
    "\u222a": r" \cup ",
    "\u2229": r" \cap ",
    "\u2208": r" \in ",
    "\u00b1": r" \pm ",
    "\u2213": r" \mp ",
    "\u2248": r" \approx ",
    "\u03b8": r"\theta ",
    "\u03b1": r"\alpha ",
    "\u03b2": r"\beta ",
    "\u211d": r"\mathbb{R}",
    "\u2124": r"\mathbb{Z}",
    "\u22ef": r"\cdots ",
    "\u2026": r"\ldots ",
}
_SIGN_TABLE = str.maketrans(_SIGNS)
_VULGAR = re.compile("[\u00bc-\u00be\u2150-\u215e]")
_RAISED = re.compile("[\u2070\u00b9\u00b2\u00b3\u2074-\u207b\u207f]+")
_LOWERED = re.compile("[\u2080-\u2089]+")
_COMPATIBLE = re.compile("[\uff01-\uff5e\U0001d400-\U0001d7ff\u2488-\u249b]")
_REPLACED: list[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]]] = [
    (re.compile(r"(?<![\w)}\]*])\*\*(?=[^\s*])([^*]+)\*\*"), r"\1"),  # Markdown's bold, not a power
    (
        re.compile(
            r"(?<!\\)\\(?:displaystyle|textstyle|quad|qquad|hfill|,|;|:|>|!|\s)(?![A-Za-z])|(?<!\\)~(?!=)|&nbsp;"
        ),
        " ",
    ),
    (re.compile(r"\\(?:color|textcolor)\s*\{[^{}]*\}|\\(?:bf|rm|it|large|Large|huge)(?![A-Za-z])"), ""),
    (re.compile(r"\\underline\s*\{([^{}]*)\}"), r"\1"),
    (re.compile(r"(?i)(?<![A-Za-z])([ap])\.\s*m(?![A-Za-z])\.?"), r"\1m"),
    (re.compile(r"(?<=\d)\^?\{?\s*(?:\\(?:text|mathrm)\s*\{\s*)?(?:st|nd|rd|th)\s*\}?\s*\}?(?![\w^{(])"), ""),
    (re.compile(r"\\(?:text|mathrm|operatorname)\s*\{\s*([.,;]?)\s*\}"), r"\1"),
    (re.compile(r"\\(?:text|mathrm|operatorname)\s*\{\s*([ie])\s*\}"), r" \1"),
    (re.compile(r"(?<=\d)\s+i(?![A-Za-z])"), "i"),  # math-verify takes `4 i` for another number than `4i`
    (re.compile(r"_\{(\w)\}(?!\w)"), r"_\1"),
    (re.compile(r"\\varnothing\b"), r"\\emptyset"),
    (re.compile(r"\\[lr]brace\b"), lambda found: "\\{" if "l" in found.group() else "\\}"),
    (re.compile(r"\\langle\b|\\left\s*\\langle\b"), "("),
    (re.compile(r"\\rangle\b|\\right\s*\\rangle\b"), ")"),
    (re.compile(r"<=|\\leqslant\b"), r" \\le "),
    (re.compile(r">=|\\geqslant\b"), r" \\ge "),
    (re.compile(r"\{\s*([,.])\s*\}"), r"\1"),
    (re.compile(r"\u221a\s*(\d+(?:\.\d+)?|[A-Za-z])"), r"\\sqrt{\1}"),
    (re.compile(r"\u221a\s*\(([^()]*)\)"), r"\\sqrt{\1}"),
    (re.compile(r"\u221a"), r"\\sqrt"),
    (re.compile(r"(?<![A-Za-z\\])pi(?![A-Za-z])"), r"\\pi "),
    (re.compile(r"\*\*\s*(\(|\{|-?[\w.]+)"), lambda found: _power(found.group(1))),
    (re.compile(r"\\overline\s*(\d)(?!\d)"), r"\\overline{\1}"),
]
# LaTeX's ways to set thousands apart, spaces and apostrophes, between a digit and three more.
_SPACED_THOUSANDS = re.compile(r"(?<![\w.,/^\\}])\d{1,3}(?: +\d{3})+(?![\w/^])")
_THIN_SPACE = re.compile(r"(?<=\d)(?:\\[,;:!> ]|~|\{,\},?\\!|,\\!|\{,\})\s*(?=\d{3}(?!\d))")
_APOSTROPHES = re.compile(r"(?<![\w.,])\d{1,3}(?:'\d{3})+(?!\d)")
_THOUSANDS = re.compile(r"(?<![\d.,])\d{1,3}(?:,\d{3})+(?!\d)")
_INDIAN = re.compile(r"[-+]?(?:\\?[$]|Rs\.?|INR|\u20b9)?\s*\d{1,2}(?:,\d{2})+,\d{3}(?:\.\d+)?(?![\d,])(?=[^,]*\Z)")
_COMMA = re.compile(r"(?<=\d),(?=\d)")
_SCIENTIFIC = re.compile(r"(?<![\w.\\])(\d+\.?\d*|\.\d+)[eE]([-+]?\d{1,4})(?![\w.])")
_MIXED = re.compile(
    r"(?<![\w.^_}/\\])(\d+)\s*(?:\s(\d+)\s*/\s*(\d+)(?![\w.^])|\\[dtc]?frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\})"
)
_REPEATING = re.compile(
    r"(?<![\w.])(\d*)\.(\d*)(?:\\(?:overline|bar|dot|overbar)\s*\{?\s*(\d+)\s*\}?|\((\d+)\)(?![\w^]))(?!\d)"
)
_DIGITS_MAX = 100
_TRIGONOMETRY = re.compile(r"\\(?:sin|cos|tan|cot|sec|csc)(?![A-Za-z])")
_DEGREES = re.compile(r"(\d+(?:\.\d+)?)\s*\^\s*(?:\{\s*\\circ\s*\}|\\circ(?![A-Za-z]))")
_MEMBER = re.compile(r"^\s*[A-Za-z]\s*\\in(?![A-Za-z])\s*")
_ENCLOSED = re.compile(r"(?<!\\)(?:\\\\)*\\[()\[\]]")


def plain_notation(text: str) -> str:
    r"""Rewrite a text to plain characters and LaTeX's plainest commands, with numbers in English notation.

    `1\,000` and `1 000` become `1000`, as `1,000` does, and `1,22`, which is no number in English, becomes the list
    `1, 22`. `1e-5` becomes `0.00001`, `1 1/2` and `0.\overline{3}` become fractions, `2**3` becomes `2^{3}`, and
    `\sin 30^\circ` has its angle in radians. Delimiters of mathematics become `$`.
    """
    text = _plain_characters(text)
    text = _THIN_SPACE.sub("", text)
    text = _ENCLOSED.sub(lambda found: found.group()[:-2] + "$", text)
    for pattern, replacement in _REPLACED:
        text = pattern.sub(replacement, text)
    text = _plain_numbers(text)
    if _TRIGONOMETRY.search(text):
        text = _DEGREES.sub(lambda found: f"{{({_fraction(Fraction(found.group(1)) / 180)}\\pi)}}", text)
    return _MEMBER.sub("", text).strip()


def dollar_signs(text: str) -> int:
    r"""How many dollar signs in `text` open or close mathematics, unlike `\$`, which is money."""
    return len(_DOLLAR.findall(text))


def undressed(text: str) -> str:
    r"""Unwrap the content of `\text{}` and similar commands."""
    previous = None
    while previous != text:
        previous, text = text, DRESS.sub(lambda found: found.group(1) or found.group(2) or "", text)
    return text


def letters_of(answer: str) -> str | None:
    r"""The letters of an answer in words, without `\text{}` and case; None for an answer with anything but letters.

    math-verify would read a word as the product of its letters, and so take anagrams for equal.
    """
    bare = DRESS.sub(r" \1 ", answer.replace("\\$", "").replace("$", "")).replace("\\ ", " ").replace("~", " ").strip()
    return "".join(filter(str.isalpha, bare)).casefold() if _LETTERS.fullmatch(bare) else None


def is_word(answer: str) -> bool:
    """Whether an answer is in words: only letters, and at least two adjacent letters."""
    return letters_of(answer) is not None and re.search(r"[^\W\d_]{2}", DRESS.sub(r" \1 ", answer)) is not None


def _plain_characters(text: str) -> str:
    if text.isascii():
        return text
    text = _RAISED.sub(lambda found: f"^{{{unicodedata.normalize('NFKC', found.group())}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{unicodedata.normalize('NFKC', found.group())}}}", text)
    text = _VULGAR.sub(lambda found: " " + unicodedata.normalize("NFKC", found.group()), text)
    text = _COMPATIBLE.sub(lambda found: unicodedata.normalize("NFKC", found.group()), text)
    return re.sub("^\\s*[\u2013\u2010\u2011](?=[\\d.])", "-", text.translate(_SIGN_TABLE))


def _plain_numbers(text: str) -> str:
    text = _APOSTROPHES.sub(lambda found: found.group().replace("'", ""), text)
    if _INDIAN.match(text.strip()):
        text = text.replace(",", "")
    pieces, end = [], 0
    for number in _THOUSANDS.finditer(text):
        pieces += [_COMMA.sub(", ", text[end : number.start()]), number.group().replace(",", "")]
        end = number.end()
    text = "".join(pieces) + _COMMA.sub(", ", text[end:])
    text = _SPACED_THOUSANDS.sub(lambda found: found.group().replace(" ", ""), text)
    text = _MIXED.sub(_mixed, text)
    text = _REPEATING.sub(_repeating, text)
    return _SCIENTIFIC.sub(_decimal, text)


def _mixed(found: re.Match[str]) -> str:
    whole, above, below = found.group(1), found.group(2) or found.group(4), found.group(3) or found.group(5)
    if len(found.group()) > _DIGITS_MAX or not 0 < int(above) < int(below):
        return found.group()
    return _fraction(int(whole) + Fraction(int(above), int(below)))


def _repeating(found: re.Match[str]) -> str:
    whole, fixed, again = found.group(1) or "0", found.group(2), found.group(3) or found.group(4)
    if len(found.group()) > _DIGITS_MAX:
        return found.group()
    value = Fraction(int(whole + fixed + again) - int(whole + fixed), (10 ** len(again) - 1) * 10 ** len(fixed))
    return _fraction(value)


def _decimal(found: re.Match[str]) -> str:
    exponent = int(found.group(2))
    return f"{found.group(1)} \\cdot 10^{{{exponent}}}"


def _fraction(value: Fraction) -> str:
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}" if value.denominator > 1 else str(value.numerator)


def _power(exponent: str) -> str:
    return f"^{exponent}" if exponent in ("(", "{") else f"^{{{exponent}}}"
