"""How long a call to a remote store may take, over all its attempts. It knows nothing about any store."""

import random
import time

# A body adds to the deadline the time that it takes at this rate, the slowest transfer that is not called a failure.
BYTES_PER_S_MIN = 8 << 20
BACKOFF_S_MAX = 5.0


class Budget:
    """The time of one call: `deadline_s` for all attempts, half of it for each, and the time of `num_bytes`."""

    def __init__(self, deadline_s: float, num_bytes: int) -> None:
        self.attempts = 0
        self._deadline_s = deadline_s
        self._transfer_s = num_bytes / BYTES_PER_S_MIN
        self._began_s = self._attempt_began_s = time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self._began_s

    @property
    def left_s(self) -> float:
        return self._deadline_s + self._transfer_s - self.elapsed_s

    @property
    def attempt_left_s(self) -> float:
        ends_s = self._attempt_began_s + self._deadline_s / 2 + self._transfer_s
        return min(self.left_s, ends_s - time.monotonic())

    def begin_attempt(self) -> None:
        self.attempts += 1
        self._attempt_began_s = time.monotonic()

    def carry(self, num_bytes: int) -> None:
        """Allow time for the answer's body of `num_bytes`, a size known only from its headers."""
        self._transfer_s = num_bytes / BYTES_PER_S_MIN

    def pause(self, backoff_s: float) -> bool:
        """Wait for a random part of `backoff_s` * 2^n before the next attempt; False, at once, if no time is left.

        The whole pause is random, so that a crew that was throttled together does not return together.
        """
        pause_s = random.uniform(0.0, min(BACKOFF_S_MAX, backoff_s * 2 ** (self.attempts - 1)))
        if pause_s >= self.left_s:
            return False
        time.sleep(pause_s)
        return True
