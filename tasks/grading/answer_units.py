r"""Units and bases after a number, so that `5 m` differs from `5 cm`, and `43_7` from `43_6`."""

import re
from dataclasses import dataclass

from tasks.grading.answer_notation import undressed


def _words(text: str) -> frozenset[str]:
    return frozenset(re.findall(r"\w+", text))


# The unit that each name stands for; of one quantity several units may be here, and no two of them are equal.
_NAMES = {
    "mm": "mm millimeter millimetre",
    "cm": "cm centimeter centimetre",
    "dm": "dm decimeter decimetre",
    "m": "m meter metre",
    "km": "km kilometer kilometre",
    "in": "in inch inches",
    "ft": "ft foot feet",
    "yd": "yd yard",
    "mi": "mi mile",
    "mg": "mg milligram",
    "g": "g gram gm",
    "kg": "kg kilogram kilo",
    "lb": "lb pound",
    "oz": "oz ounce",
    "ton": "ton tonne",
    "ms": "ms millisecond",
    "s": "s sec second",
    "min": "min minute",
    "h": "h hr hour",
    "day": "day",
    "week": "week wk",
    "month": "month mo",
    "year": "year yr",
    "am": "am",
    "pm": "pm",
    "ml": "ml mL milliliter millilitre",
    "l": "l L liter litre",
    "gal": "gal gallon",
    "pint": "pint",
    "quart": "quart",
    "cup": "cup",
    "degree": r"degree deg \circ",
    "rad": "rad radian",
    "usd": r"usd USD dollar buck \$ $",
    "C": "C celsius",
    "F": "F fahrenheit",
    "K": "K kelvin",
    "cent": "cent ¢",
    "eur": "eur EUR euro €",
    "gbp": "gbp GBP £",
    "jpy": "jpy JPY yen ¥",
    "inr": "inr INR rupee Rs ₹",
    "mi/h": "mph",
    "km/h": "kmh kph",
    "N": "N newton Newton",
    "J": "J joule Joule",
    "W": "W watt Watt",
    "V": "V volt Volt",
    "Hz": "Hz hertz",
}
_MONEY = frozenset(["usd", "cent", "eur", "gbp", "jpy", "inr"])
_UNITS = {name: unit for unit, names in _NAMES.items() for name in names.split()}
_SCALES = {"dozen": 12, "hundred": 100, "thousand": 1_000, "million": 10**6, "billion": 10**9, "trillion": 10**12}
_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
)
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety"
_NUMERALS = {word: number for number, word in enumerate(_ONES.split())} | {
    word: 10 * number for number, word in enumerate(_TENS.split(), 2)
}
_WORD = re.compile(r"\\circ|[^\W\d_]+")
_EXPONENT = r"(?:\s*\^\s*(?:\{\s*-?\d\s*\}|-?\d))?"
# What an answer consists of, as far as it matters where the words behind a number begin.
_TOKEN = re.compile(
    rf"(?P<dressed>\\(?:text|textbf|textit|textrm|textnormal|mathrm|mbox|hbox)\s*\{{(?P<words>[^{{}}\d]*)\}}{_EXPONENT})"
    rf"|(?P<sign>\^\s*(?:\{{\s*\\circ\s*\}}|\\circ(?![A-Za-z]))(?:\s*[CFK]\b)?|[€¢£¥₹])"
    rf"|(?P<command>\\[A-Za-z]+|\\.)|(?P<word>[^\W\d_]+){_EXPONENT}|(?P<join>[\s.,;:/()]+)|(?P<other>.)",
    re.DOTALL,
)
_BARE = re.compile(r"[^\W\d_]")
# A letter of a formula, unless all of it is the name that it gives its value, as in `x = 5`.
_LETTER = re.compile(r"(?<![A-Za-z\\])[A-Za-z](?!\s*=)(?![^{}]*\})(?<!\\)")
_BASE = re.compile(
    r"(?P<digits>\(?[0-9A-F]*\d[0-9A-F]*\)?)\s*(?:_\s*\{?\s*(?:\\(?:text|mathrm|textrm|mbox)\s*\{)?\s*(?:base)?\s*"
    r"(?P<low>\d{1,2}|[a-z]+)\s*\}?\s*\}?|\s(?:\\text\s*\{\s*)?(?:in\s+)?base[- ](?P<said>\d{1,2}|[a-z]+)\s*\}?)"
)
_SHORT = frozenset({"a", "an", "of", "in", "per", "to", "at", "by", "sq", "cu", "th", "st", "nd", "rd"})
_FUNCTIONS = _words(
    "and or sin cos tan cot sec csc log exp sqrt mod max gcd lcm det inf infinity choose arcsin arccos arctan"
)
# Beside these words a number is not the answer, or not the whole of it; before the others it counts something else.
_CHANGING = _words(
    "not never no isn aren wasn wrong incorrect false least most than between except without or either neither nor half"
    " halves third thirds quarter quarters fourth fourths fifth fifths sixth sixths eighth eighths tenth tenths"
    " hundredth hundredths thousandth thousandths twice double triple root factorial minus plus divided unknown"
    " impossible"
)
_COUNTING = _words(
    "more fewer less over under above below times step case part question problem example exercise figure method"
    " approach option squared cubed"
)


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit as a product of powers of names.

    Attributes:
        factors: Pairs of a name and its power, sorted.
        is_known: True if every name is in the table.
    """

    factors: tuple[tuple[str, int], ...]
    is_known: bool

    def differs(self, other: "Unit") -> bool:
        """Whether two units certainly differ; unknown words may be synonyms."""
        if self.is_known and other.is_known:
            mine, its = ({name for name, power in unit.factors if power > 0} for unit in (self, other))
            # An amount of money may leave unsaid of what it is the price.
            is_price = mine == its and not mine.isdisjoint(_MONEY) and 1 in (len(self.factors), len(other.factors))
            return self.factors != other.factors and not is_price
        return self.factors != other.factors and {name for name, _ in self.factors} == {
            name for name, _ in other.factors
        }


def without_unit(text: str) -> tuple[str, str]:
    """Split an answer into the text before the trailing words, and the words; letters of a formula are no words."""
    tokens = list(_TOKEN.finditer(text))
    start = end = len(tokens)
    while start and _may_belong(tokens, start - 1, text):
        start -= 1
        end = start if tokens[start].lastgroup != "join" and tokens[start].group() != "\\cdot" else end
    at = tokens[end].start() if end < len(tokens) else len(text)
    before, tail = text[:at].rstrip(" .,;:/"), text[at:].strip(" .,;:")
    if _BARE.search(re.sub(r"\\[A-Za-z]+(?:\{[^{}]*\})?", " ", tail)) and _LETTER.search(before):
        tail = ""  # letters of the formula
    if not tail or not re.search(r"[\w)}\]|%!]\Z", before) or re.search(r"\\(?!pi\Z|circ\Z)[A-Za-z]+\Z", before):
        bare = text.strip().rstrip(".,;:").strip()
        if not before.endswith("(") or not tail.endswith(")"):
            return bare, ""
        before, tail = before[:-1].strip(), tail[:-1]
    return before, tail


def read_unit(tail: str, symbol: str = "") -> Unit | None:
    """The unit in the words after a number, or of the currency `symbol` before the number; None without a unit."""
    factors: dict[str, int] = {}
    power, sign, is_known = 1, 1, True
    text = undressed(tail).replace("\\$", "$")
    for found in re.finditer(r"\\circ|[$€£¥₹¢]|[^\W\d_]+|/|\^\s*\{?\s*(-?\d)\s*\}?", f"{symbol} {text}"):
        word = found.group()
        if found.group(1):
            last = next(reversed(factors), None)
            if last is not None:
                factors[last] = factors[last] * int(found.group(1))
        elif word in ("/", "per") or (word in ("a", "an", "each", "every") and factors):
            sign = -1
        elif word in ("square", "sq", "squared"):
            power = 2
        elif word in ("cubic", "cu"):
            power = 3
        elif word not in ("a", "an", "the", "each", "every"):
            name = _name(word)
            is_known = is_known and name in _NAMES
            factors[name] = factors.get(name, 0) + sign * power
            power, sign = 1, 1
    if not factors:
        return None
    if factors.keys() & {"C", "F", "K"}:
        factors.pop("degree", None)
    split = {"mi/h": {"mi": 1, "h": -1}, "km/h": {"km": 1, "h": -1}}
    whole = {part: count for name, count in factors.items() for part, count in split.get(name, {name: count}).items()}
    return Unit(tuple(sorted(whole.items())), is_known)


def scale_of(tail: str) -> int:
    """The factor that the words after a number name: 1, 12 for a dozen, 1000 for a thousand and so on."""
    words = _WORD.findall(undressed(tail).casefold())
    return _SCALES.get(words[0].removesuffix("s"), 1) if words else 1


def number_in_words(text: str) -> int | None:
    """The number that is written out in all of `text`, as in `twenty-one`."""
    total, part = 0, -1
    for word in _WORD.findall(text.casefold()):
        if word in _SCALES and part > 0:
            part *= _SCALES[word]
            total, part = (total + part, 0) if _SCALES[word] > 100 else (total, part)
        elif word in _NUMERALS:
            part = max(part, 0) + _NUMERALS[word]
        elif word != "and" or part < 0:
            return None
    return total + part if part >= 0 else None


def changes_meaning(before: str, behind: str) -> bool:
    """Whether words beside a number may change or deny the answer, as in `not 4`, `4 or more`, `half of 4`."""
    said, follows = (_WORD.findall(undressed(words).casefold()) for words in (before, behind))
    return not (
        _CHANGING.isdisjoint((*said, *follows))
        and _COUNTING.isdisjoint(said)
        and (not follows or follows[0] not in ("squared", "cubed"))
    )


def without_base(text: str) -> tuple[str, int | None]:
    """The digits and the base of a number that names its base; otherwise the text as given, and None."""
    found = _BASE.fullmatch(text)
    said = found and (found.group("low") or found.group("said"))
    base = (int(said) if said.isdigit() else _NUMERALS.get(said)) if said else None
    return (found.group("digits").strip("()"), base) if found and base else (text, None)


def _may_belong(tokens: list[re.Match[str]], place: int, text: str) -> bool:
    """Whether a token may belong to the words after a number."""
    token, kind = tokens[place], tokens[place].lastgroup
    if kind == "dressed":
        words = _WORD.findall(token.group("words"))
        return (
            bool(words)
            and all(len(word) > 1 or word in _UNITS or word in _SHORT for word in words)
            and (_FUNCTIONS.isdisjoint(words))
        )
    if kind == "word":
        word, begin = token.group("word"), token.start()
        if word.casefold() in _FUNCTIONS or begin == 0:
            return False
        if _name(word) in _NAMES:
            return text[begin - 1] in " /" or text[begin - 1].isdigit() or text[begin - 1] in "}%)"
        return text[begin - 1] in " /(" and (
            word in _SHORT or (len(word) > 2 and re.search("(?i)[aeiouy]", word) is not None)
        )
    return kind in ("sign", "join") or token.group() in ("\\cdot", "\\$")


def _name(word: str) -> str:
    """The unit that a word names, or the word itself, in the singular."""
    if len(word) == 1:
        return _UNITS.get(word, word)
    for name in (word, word.casefold()):
        for form in (name, name.removesuffix("s"), name.removesuffix("es")):
            if form in _UNITS and len(form) > 1:
                return _UNITS[form]
    return word.casefold().removesuffix("s")
