"""PlainDecoding: the seconds that the same responses would have taken without drafts, step by step.

The price of a token without drafts depends on the responses in flight, and these differ with and without: lucky
responses end early, and unlucky ones stay alone. So a second engine decodes in thought, one token of each response a
step, in the order in which responses came, and each step costs what the real engine has measured.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import islice

from tasks.sampling.engines.draft_counts import StepTimes


class PlainDecoding:
    """An engine without drafts, in thought; it has as many rows as the real engine ever had responses in flight."""

    def __init__(self, times: StepTimes) -> None:
        """times: of the real engine's steps, with drafts and without, as measured so far at any time."""
        self._times = times
        self._plain_times = StepTimes()
        self._seconds = 0.0
        self._unpriced: Counter[int] = Counter()  # steps by their number of responses
        self._rows = 0
        self._live: set[int] = set()
        # By response, in order of arrival: the tokens that the real engine is ahead.
        self._ahead: dict[int, int] = {}

    @property
    def seconds(self) -> float | None:
        """Seconds of all steps so far; None if measured times do not tell what one of them takes.

        The steps are those for tokens that the real engine has found; it may be ahead while responses are in flight.
        """
        return None if self._unpriced else self._seconds

    def start(self, responses: Iterable[int]) -> None:
        """These responses come into flight."""
        for response in responses:
            self._live.add(response)
            self._ahead.setdefault(response, 0)
        self._rows = max(self._rows, len(self._live))

    def leave(self, responses: Iterable[int]) -> None:
        """These responses were aborted. Tokens that the real engine was ahead are forgotten.

        If nothing is in flight any more, that holds for all responses: their numbers may come again in another plan.
        """
        for response in responses:
            self._live.discard(response)
            self._ahead.pop(response, None)
        if not self._live:
            self._ahead.clear()

    def follow(self, found: Mapping[int, int], ended: Iterable[int], took_s: float, *, plain: bool) -> None:
        """Decode what can be decoded after a step of the real engine.

        Args:
            found: the number of new tokens of each response in flight.
            ended: the responses that ended.
            took_s: seconds of the real engine's step.
            plain: whether that step verified no drafts.
        """
        if plain:
            self._plain_times.measured(len(found), 1, took_s)
        self._live.difference_update(ended)
        if plain and not any(self._ahead.values()):
            self._seconds += took_s
            for response in ended:
                del self._ahead[response]
            return
        for response, tokens in found.items():
            self._ahead[response] += tokens
        while self._ahead:
            active = list(islice(self._ahead, self._rows))
            steps = min(self._ahead[response] for response in active)
            if not steps:
                break  # the real engine has not found the next token
            self._unpriced[len(active)] += steps
            for response in active:
                self._ahead[response] -= steps
                if not self._ahead[response] and response not in self._live:
                    del self._ahead[response]
        self._price()

    def _price(self) -> None:
        for responses, steps in list(self._unpriced.items()):
            step_s = self._step_s(responses)
            if step_s is not None:
                self._seconds += steps * step_s
                del self._unpriced[responses]

    def _step_s(self, responses: int) -> float | None:
        """Seconds of a plain step: of measured plain steps, or else of steps that feed as many tokens."""
        for known in (self._plain_times.between, self._times.between, self._times.outside):
            if (seconds := known(responses)) is not None:
                return seconds
        return None
