"""The verifier of mathematics: whether the answer in a completion equals the ground truth, by math-verify.

It runs in the worker process under the parent's time limit; math-verify's own time-outs use signals and are off.
"""

import logging
from typing import Any

from tasks.grading.reward import GradingCase, Needs

GROUND_TRUTH_COLUMNS = ("ground_truth", "answer", "solution")
NEEDS: Needs = (GROUND_TRUTH_COLUMNS,)


def grade_mathematics(case: GradingCase) -> float:
    r"""1.0 when the completion's answer equals the first of GROUND_TRUTH_COLUMNS that the case has, else 0.0.

    The answer is the last \boxed{} or all of them as a set; or else the text after the last "####" (GSM8K); or else
    what math-verify takes for the final answer. Raises ValueError if the ground truth is missing or is not
    mathematics, because that is not the response's fault.
    """
    # Imported here, because it takes most of a second and only the worker process needs it.
    from math_verify import parse, verify  # noqa: PLC0415

    # Otherwise it logs at every call that its time-outs are off.
    logging.getLogger("math_verify").setLevel(logging.ERROR)
    truth = next((case.columns[name] for name in GROUND_TRUTH_COLUMNS if case.columns.get(name) is not None), None)
    if truth is None:
        raise ValueError(f"no value in any of the columns {', '.join(GROUND_TRUTH_COLUMNS)}")
    gold = parse(_gold_text(truth), parsing_timeout=None)
    if not gold:
        raise ValueError(f"the ground truth {str(truth)[:200]!r} is no mathematics")
    for text in _readings(case.completion):
        answer = parse(text, parsing_timeout=None)
        if answer and verify(gold, answer, timeout_seconds=None):
            return 1.0
    return 0.0


def _gold_text(truth: Any) -> str:
    text = _after_marker(str(truth))
    # math-verify finds mathematics in prose by delimiters, so a bare ground truth gets some.
    return text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}"


def _readings(completion: str) -> list[str]:
    text = _after_marker(completion)
    if text.count("\\boxed") < 2:
        return [text]
    # math-verify joins the boxes of a line to a set, so the last box, a corrected answer, is checked alone first.
    return [text[text.rindex("\\boxed") :], text]


def _after_marker(text: str) -> str:
    if "\\boxed" in text or "####" not in text:
        return text
    return text.rsplit("####", 1)[1].strip()
