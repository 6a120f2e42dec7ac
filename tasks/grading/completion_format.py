"""The format verifier: whether a completion as a whole matches a regular expression.

It runs in the worker process under a time limit, because some expressions take exponential time.
"""

import re


class FormatVerifier:
    """A compiled expression, in which "." also matches line ends."""

    def __init__(self, pattern: str) -> None:
        self._pattern = re.compile(pattern, re.DOTALL)

    def grade(self, completion: str) -> float:
        """1.0 when the whole completion matches, else 0.0."""
        return 1.0 if self._pattern.fullmatch(completion) else 0.0
