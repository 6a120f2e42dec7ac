"""The verifier of mathematics: whether the answer in a completion equals the ground truth, by math-verify.

It runs in the worker process under the parent's time limit; math-verify's own time-outs use signals and are off.
"""

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tasks.grading import answer_text
from tasks.grading.reward import GradingCase, GradingError, Needs

GROUND_TRUTH_COLUMNS = ("ground_truth", "answer", "solution")
NEEDS: Needs = (GROUND_TRUTH_COLUMNS,)
_NAMED_ROWS = 5


@dataclass(frozen=True, slots=True)
class _Stated:
    """What a text states as its answer: its only box or the line after its marker, if any; and texts to parse."""

    answer: str | None
    readings: tuple[str, ...]


def grade_mathematics(case: GradingCase) -> float:
    r"""1.0 when the completion's answer equals the first of GROUND_TRUTH_COLUMNS that the case has, else 0.0.

    The answer is what follows the last `</think>`: the last \boxed{} or \fbox{}, or all of them as a set; or else the
    line after the last "####" (GSM8K); or else what math-verify takes for the final answer. Answers in words are
    compared letter by letter. A number too large to compute equals only itself as it is written. Raises ValueError if
    the ground truth is missing or is not mathematics, because that is not the response's fault.
    """
    truth = _truth(case.columns)
    gold = _stated_by_truth(truth)
    parsed = _parsed_truth(truth, gold)
    stated = _stated(answer_text.outside_thinking(case.completion))
    if gold.answer is not None and stated.answer is not None:
        if gold.answer.split() == stated.answer.split():
            return 1.0
        letters = answer_text.letters_of(stated.answer)
        if letters is not None and answer_text.is_word(gold.answer):
            return 1.0 if letters == answer_text.letters_of(gold.answer) else 0.0
    return 1.0 if parsed and any(_equal(parsed, reading) for reading in stated.readings) else 0.0


def check_truths(cases: Sequence[GradingCase]) -> None:
    """Raise GradingError, which names some of the rows, if there are cases whose ground truth cannot be graded."""
    found = []
    for case in cases:
        try:
            truth = _truth(case.columns)
            _parsed_truth(truth, _stated_by_truth(truth))
        except ValueError as error:
            found.append(f"row {case.response}: {error}")
    if found:
        more = f"; and {len(found) - _NAMED_ROWS} more rows" if len(found) > _NAMED_ROWS else ""
        raise GradingError(f"reward 'math' cannot grade {'; '.join(found[:_NAMED_ROWS])}{more}")


def _truth(columns: dict[str, Any]) -> Any:
    truth = next((columns[name] for name in GROUND_TRUTH_COLUMNS if columns.get(name) is not None), None)
    if truth is None:
        raise ValueError(f"no value in any of the columns {', '.join(GROUND_TRUTH_COLUMNS)}")
    return truth


def _parsed_truth(truth: Any, gold: _Stated) -> list[Any]:
    """The ground truth for math-verify; empty if it holds a number that is too large to compute."""
    if gold.answer and answer_text.is_too_large(gold.answer):
        return []
    parsed = next((found for reading in gold.readings if (found := _parsed(reading))), [])
    if not parsed:
        raise ValueError(f"the ground truth {str(truth)[:200]!r} is no mathematics")
    return parsed


def _stated_by_truth(truth: Any) -> _Stated:
    # A float's own text may have an exponent, "1e-05", which is a product with e in mathematics.
    written = f"{Decimal(str(truth)):f}" if isinstance(truth, float) and math.isfinite(truth) else str(truth)
    text = answer_text.plain_notation(written)
    contents = answer_text.box_contents(text)
    if contents:
        return _Stated(contents[0] if len(contents) == 1 else None, (text,))
    answer = answer_text.after_marker(text).strip()
    signs = answer_text.dollar_signs(answer)
    # math-verify finds mathematics in prose by delimiters, so a bare ground truth gets some.
    bare = answer if not signs else answer_text.without_dollar_signs(answer)
    return _Stated(answer, (answer,) if signs and signs % 2 == 0 else (f"\\boxed{{{bare}}}",))


def _stated(completion: str) -> _Stated:
    text = answer_text.plain_notation(completion)
    contents = answer_text.box_contents(text)
    if contents:
        last = f"\\boxed{{{contents[-1]}}}"
        # math-verify joins the boxes of a line to a set, so the last box, a corrected answer, is checked alone first.
        return _Stated(contents[-1], (last, text) if len(contents) > 1 else (last,))
    if "####" not in text:
        return _Stated(None, (text,))
    line = answer_text.without_space_in_numbers(answer_text.after_marker(text))
    return _Stated(line, (line if answer_text.is_prose(line) else f"\\boxed{{{line}}}",))


def _equal(gold: list[Any], reading: str) -> bool:
    from math_verify import verify  # noqa: PLC0415 - see _parsed

    looked_at = answer_text.box_contents(reading) or reading.strip().splitlines()[-1:]
    if any(answer_text.is_too_large(text) for text in looked_at):
        return False
    answer = _parsed(reading)
    return bool(answer) and bool(verify(gold, answer, timeout_seconds=None))


def _parsed(text: str) -> list[Any]:
    # Imported here, because it takes most of a second and only the worker process needs it.
    from math_verify import parse  # noqa: PLC0415

    # Otherwise it logs at every call that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    found: list[Any] = parse(text, parsing_timeout=None)
    return found
