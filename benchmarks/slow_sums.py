"""The environment of examples/hidden_sums.py with a tool that takes a second, for `benchmarks.turns`."""

import time

from examples.hidden_sums import HiddenSums

CALL_S = 1.0


class SlowSums(HiddenSums):
    """As HiddenSums, but slow."""

    def look(self, key: str) -> str:
        """Look up the digit behind a key.

        Args:
            key: one of the letters that the question names.
        """
        time.sleep(CALL_S)
        return super().look(key)
