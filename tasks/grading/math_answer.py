"""The verifier of mathematics: whether the answer in a completion equals the ground truth, by math-verify.

It runs in the worker process under the parent's time limit; math-verify's own time-outs use signals and are off.
"""

import logging
import math
import re
from collections.abc import Sequence
from dataclasses import replace
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache
from typing import Any

from tasks.grading import answer_text
from tasks.grading.answer_reading import NoReading, Reading, read
from tasks.grading.number_size import LENGTH_MAX
from tasks.grading.reward import GradingCase, GradingError, Needs

GROUND_TRUTH_COLUMNS = ("ground_truth", "answer", "solution")
NEEDS: Needs = (GROUND_TRUTH_COLUMNS,)
_NAMED_ROWS = 5
# Decimals are compared as math-verify does, to 6 places, and, because small ones would all be 0, to 4 digits.
_PLACES, _RELATIVE = 6, Fraction(1, 10_000)
_TIME = re.compile(r"\d{1,2}:\d{2}")
_COLLECTION = re.compile(r"\s*[\[{]\s*[\"'{]")


def grade_mathematics(case: GradingCase) -> float:
    r"""1.0 when the completion's answer equals the first of GROUND_TRUTH_COLUMNS that the case has, else 0.0.

    The answer follows the last `</think>`. The answer is the last \boxed{} or \fbox{}, or all boxes of a list; or else
    the text that the last `<answer>` and `</answer>` enclose; or else the text after the last "####" (GSM8K) or "the
    answer is". Any other text states no answer. Answers in words are compared letter by letter. A number too large to
    compute equals only an answer with equal characters. Raises ValueError if the ground truth is missing or cannot be
    read, because a missing truth is not the response's fault.
    """
    return 1.0 if _is_right(_read_truth(_truth(case.columns)), case.completion) else 0.0


# An equation, a set, a sum, a root, an interval and a relation: math-verify reads each in another way.
_KNOWN = (
    ("4", "x=4"),
    (r"\{2,1\}", r"\{1,2\}"),
    ("(x+1)^2", "x^2+2x+1"),
    (r"1/\sqrt{3}", r"\frac{\sqrt{3}}{3}"),
    (r"x \le 2", r"(-\infty,2]"),
    ("y=2x+1", "y=2x+1"),
)


def check_truths(cases: Sequence[GradingCase]) -> None:
    r"""Raise GradingError, which names some of the rows, if there are cases whose ground truth cannot be graded.

    Each truth must be readable, and equal to an answer with the truth's text in `\boxed{}` and in `<answer>` tags; for
    prose, with the truth's number. cases: a case for each row, with the row's file and line as prompt, and the row's
    number as response.
    """
    found = []
    for case in cases:
        try:
            _check_truth(_truth(case.columns))
        except ValueError as error:
            found.append(f"{case.prompt or f'row {case.response}'}: {error}")
    if found:
        more = f"; and {len(found) - _NAMED_ROWS} more rows" if len(found) > _NAMED_ROWS else ""
        raise GradingError(f"reward 'math' cannot grade {'; '.join(found[:_NAMED_ROWS])}{more}")


def _truth(columns: dict[str, Any]) -> Any:
    truth = next((columns[name] for name in GROUND_TRUTH_COLUMNS if columns.get(name) is not None), None)
    if truth is None:
        raise ValueError(f"no value in any of the columns {', '.join(GROUND_TRUTH_COLUMNS)}")
    return truth


def _check_truth(truth: Any) -> None:
    """Raise ValueError for a truth that no answer can equal, except by accidentally equal characters."""
    for reading in _read_truth(truth):
        if len(reading.written) > LENGTH_MAX:
            raise ValueError(
                f"the ground truth {_shown(truth)} has more than {LENGTH_MAX:,} characters and states no answer"
            )
        if reading.number is not None and reading.formula == reading.written:
            continue
        forms = [reading.written, *([reading.formula] if reading.number is not None else [])]
        for form in forms:
            for text in (f"\\boxed{{{form}}}", f"<answer>{form}</answer>"):
                if not _is_right([reading], text):
                    raise ValueError(f"the ground truth {_shown(truth)} is not equal to {text[:200]!r}")
        if reading.formula and not reading.is_word and not _parsed(reading.formula):
            raise ValueError(f"the ground truth {_shown(truth)} is no mathematics")


def _read_truth(truth: Any) -> list[Reading]:
    """The possible readings of a ground truth; ValueError says why there is no reading."""
    match truth:
        case dict():
            raise ValueError(
                f"the ground truth {_shown(truth)} is an object; allowed: text, a number, or a list of one"
            )
        case list() | tuple():
            return _read_list(truth)
        case float() if not math.isfinite(truth):
            raise ValueError(f"the ground truth {_shown(truth)} is no number")
    # A float's own text may have an exponent.
    text = f"{Decimal(str(truth)):f}" if isinstance(truth, float) else str(truth)
    if _COLLECTION.match(text):
        raise ValueError(f"the ground truth {_shown(truth)} is a list or object as text; allowed: its only value")
    text = answer_text.outside_thinking(text)
    found = [_read_parts(parts) for parts in answer_text.stated(text) or [(text,)]]
    readings = [reading for readings, _ in found for reading in readings]
    if not readings:
        raise ValueError(f"the ground truth {_shown(truth)} {found[0][1]}")
    return readings


def _read_list(truths: Sequence[Any]) -> list[Reading]:
    """The readings of a list of equal values; ValueError for different values, which may be alternatives or parts."""
    readings = [_read_truth(each) for each in truths if each is not None]
    if not readings:
        raise ValueError(f"the ground truth {_shown(truths)} is a list without a value")
    first = readings[0]
    for other in readings[1:]:
        if not any(_equal(mine, its) for mine in first for its in other):
            raise ValueError(f"the ground truth {_shown(truths)} is a list of different values; allowed: equal ones")
    return [each for alternatives in readings for each in alternatives]


def _is_right(truths: Sequence[Reading], completion: str) -> bool:
    return any(
        _equal(truth, answer)
        for parts in answer_text.stated(answer_text.outside_thinking(completion))
        for answer in _read_parts(parts)[0]
        for truth in truths
    )


def _read_parts(parts: Sequence[str]) -> tuple[list[Reading], str]:
    """The reading of a single part, of equal parts, or of all parts as a list; [] and the reason without a reading."""
    try:
        readings = [read(part) for part in parts]
        if all(_equal(readings[-1], other) for other in readings[:-1]):
            return [readings[-1]], ""
        return [read(", ".join(parts))], ""
    except NoReading as error:
        return [], str(error)


def _equal(truth: Reading, answer: Reading) -> bool:
    if truth.written.split() == answer.written.split():
        return True
    said = _equal_in_words(truth, answer)
    if said is not None:
        return said
    if not truth.formula or not answer.formula or _say_otherwise(truth, answer):
        return False
    if truth.number is not None and answer.number is not None:
        return _same_number(truth.number, answer.number, truth.is_percentage != answer.is_percentage)
    if _TIME.fullmatch(truth.formula) and _TIME.fullmatch(answer.formula):
        return truth.formula == answer.formula
    return _verified(truth.formula, answer.formula)


def _equal_in_words(truth: Reading, answer: Reading) -> bool | None:
    """Whether words or the letters of choices are equal; None if words and letters do not decide."""
    if truth.choice and answer.choice:
        if truth.choice != answer.choice:
            return False
        if truth.choice == truth.formula or answer.choice == answer.formula:  # one is the letter alone
            return True
    return truth.letters == answer.letters if truth.is_word and answer.letters is not None else None


def _say_otherwise(truth: Reading, answer: Reading) -> bool:
    """Whether labels, units, bases or the number of values tell two formulas apart."""
    if truth.label and answer.label and truth.label != answer.label:
        return True
    if truth.unit and answer.unit and truth.unit.differs(answer.unit):
        return True
    if truth.base and answer.base and truth.base != answer.base:
        return True
    if (truth.number is not None and answer.count > 1) or (answer.number is not None and truth.count > 1):
        return True
    return truth.repeats != answer.repeats or truth.goes_on != answer.goes_on


def _same_number(truth: Fraction, answer: Fraction, one_is_percentage: bool) -> bool:
    """Whether two numbers are equal; 9% equals both 0.09 and 9, but 0.9% does not equal 0.9, which is 90%."""
    if _close(truth, answer):
        return True
    return one_is_percentage and any(
        _close(100 * mine, its) and abs(its) >= 1 for mine, its in ((truth, answer), (answer, truth))
    )


def _close(mine: Fraction, its: Fraction) -> bool:
    return mine == its or (
        round(mine, _PLACES) == round(its, _PLACES) and abs(mine - its) <= _RELATIVE * max(abs(mine), abs(its))
    )


def works() -> bool:
    """Whether math-verify reads and compares formulas correctly; the first call loads its parser.

    An interruption during the load leaves a parser that reads nothing, and then every answer would be graded 0.
    """
    _parsed.cache_clear()
    return all(_verified(truth, answer) for truth, answer in _KNOWN)


def _verified(truth: str, answer: str) -> bool:
    from math_verify import verify  # noqa: PLC0415 - see _parsed

    gold, found = _parsed(truth), _parsed(answer)
    return (
        bool(gold)
        and bool(found)
        and bool(verify(list(gold), list(found), allow_set_relation_comp=True, timeout_seconds=None))
    )


@lru_cache(maxsize=4096)
def _parsed(formula: str) -> tuple[Any, ...]:
    # Imported here, because it takes most of a second and only the worker process needs it.
    from math_verify import LatexExtractionConfig, parse  # noqa: PLC0415

    # Otherwise it logs at every call that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    # Units are read here, because it would take the last letter of `5t` for one.
    normal = replace(LatexExtractionConfig().normalization_config, units=False, boxed="last")
    config = [LatexExtractionConfig(boxed_match_priority=0, normalization_config=normal)]
    return tuple(parse(f"\\boxed{{{formula}}}", config, parsing_timeout=None))


def _shown(truth: Any) -> str:
    return repr(str(truth)[:200])
