"""ScriptedDrafter: a deterministic drafter for tests, which knows the answers and is right as often as it is told."""

from collections.abc import Callable, Sequence

from storage.journal.noise_keys import mix64
from tasks.sampling.engines.engine import GenerationRequest

_MASK = (1 << 64) - 1

Answer = Callable[[GenerationRequest], Sequence[int]]
"""The tokens that plain decoding adds to a request; empty: unknown."""
Share = Callable[[int], float]
"""The probability with which the draft of a position, counted from the prompt's end, is right."""


def perfect(_position: int) -> float:
    """`Share` of a drafter that is always right."""
    return 1.0


def wrong(_position: int) -> float:
    """`Share` of a drafter that is never right."""
    return 0.0


def changing(position: int) -> float:
    """`Share` of a drafter that is always right, then never, then mostly, as if another had taken its place."""
    return (1.0, 0.0, 0.8)[min(position // 7, 2)]


class ScriptedDrafter:
    """A `Drafter`; its drafts are a pure function of seed, response and position."""

    def __init__(
        self, vocab_size: int, share: Share, *, answer: Answer = lambda _: (), ragged: bool = False, seed: int = 0
    ) -> None:
        """Make a drafter.

        Args:
            vocab_size: token ids are 0..vocab_size-1.
            share: how often a draft is right where the answer is known; beyond the answer drafts are random.
            answer: what is right, asked once for each request; the default knows nothing, so all drafts are random.
            ragged: whether the number of drafts is random, from none to all.
            seed: another seed gives other drafts.
        """
        self._vocab_size = vocab_size
        self._share = share
        self._answer = answer
        self._ragged = ragged
        self._seed = seed
        # By response: the request, prompt and response so far, and the answer.
        self._flying: dict[int, tuple[GenerationRequest, Sequence[int], Sequence[int]]] = {}

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None:
        for request, so_far in zip(requests, tokens, strict=True):
            self._flying[request.response] = (request, so_far, self._answer(request))

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        return [self._guess(response, most) for response in responses]

    def leave(self, responses: Sequence[int]) -> None:
        for response in responses:
            del self._flying[response]

    def _guess(self, response: int, most: int) -> list[int]:
        request, so_far, answer = self._flying[response]
        start, first = len(so_far) - len(request.prompt_ids), len(request.generated_ids)
        count = self._word(response, start, 0) % (most + 1) if self._ragged else most
        guessed = []
        for position in range(start, start + count):
            token = self._word(response, position, 1) % self._vocab_size
            if position - first < len(answer):
                right = answer[position - first]
                if self._word(response, position, 2) < self._share(position) * (_MASK + 1):
                    token = right
                elif token == right:
                    token = (token + 1) % self._vocab_size
            guessed.append(token)
        return guessed

    def _word(self, response: int, position: int, purpose: int) -> int:
        word = mix64((self._seed << 32) + response)
        return mix64((word + 3 * position + purpose) & _MASK)
