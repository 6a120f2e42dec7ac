"""ScriptedEngine: an engine without a model, for tests and simulation.

Token k of a response, its log-prob and the response's length are pure functions of (noise_key, k, weight version), so
that all code above the engine behaves as in production at no cost. Lengths are log-normal: most responses are short and
a few are very long. After an answered turn a response goes on beyond its drawn length, and stops at each further token
with a chance of one in LATER_TURN. Time passes on the caller's clock. With a drafter, draws are verified as in the
torch engine, and a draw behind a wrong draft is another, as a model's would be.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import NormalDist

from storage.clock import Clock
from storage.journal.noise_keys import mix64
from storage.records.draft_totals import DraftTotals
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.admission import check_idle, check_requests, finish_reason, tokens_left
from tasks.sampling.engines.engine import EngineError, GenerationRequest, TokenDelta
from tasks.sampling.engines.slot_table import Slot, SlotTable
from tasks.sampling.engines.speculation import Speculation, verified

_GAMMA = 0x9E3779B97F4A7C15
_MASK = (1 << 64) - 1
# Their random streams differ from that of the tokens.
_LENGTH, _LOGPROB, _TURN, _ASTRAY = 0x4C454E47, 0x4C4F4750, 0x5455524E, 0x41535452
# The mean number of tokens in a turn after the first.
LATER_TURN = 8


class ScriptedEngine:
    """An `Engine`; any tensors are accepted as weights, and only their version matters."""

    def __init__(
        self,
        vocab_size: int,
        max_responses_in_flight: int,
        *,
        context_length: int = 1 << 20,
        median_length: float = 32.0,
        length_spread: float = 0.8,
        clock: Clock | None = None,
        step_time_s: Callable[[int], float] | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """Create an engine without weights.

        Args:
            vocab_size: token ids are 0..vocab_size-1.
            max_responses_in_flight: as in `Engine`.
            context_length: the most tokens of prompt + response.
            median_length: the median length in tokens, if there are stop tokens and no limit ends a response earlier.
            length_spread: the standard deviation of the natural log of the lengths; 0 makes all lengths equal.
            clock: the clock that sleeps at every step.
            step_time_s: seconds of one step, by the number of responses in flight; None: no time passes.
            speculation: what drafts tokens, as in TorchEngine; drafts take no time.
        """
        self._vocab_size = vocab_size
        self._max_in_flight = max_responses_in_flight
        self._context_length = context_length
        self._median_length = median_length
        self._length_spread = length_spread
        self._clock = clock
        self._step_time_s = step_time_s
        self._speculation = speculation
        self._table = SlotTable(max_responses_in_flight)
        self._version: int | None = None
        self._prefill_tokens = 0

    @property
    def name(self) -> str:
        return "scripted"

    @property
    def batch_invariant(self) -> bool:
        return True

    @property
    def max_responses_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def prefill_tokens(self) -> int:
        return self._prefill_tokens

    @property
    def draft_totals(self) -> DraftTotals | None:
        return None if self._speculation is None else self._speculation.totals

    @property
    def weight_version(self) -> int | None:
        return self._version

    @property
    def patch_base(self) -> int | None:
        return self._version

    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:  # noqa: ARG002 - no model
        check_idle(version, self._table.responses)
        self._version = version
        self._table.forget()

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        self._loaded()
        check_requests(
            requests,
            self._table.responses,
            max_responses_in_flight=self._max_in_flight,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
        )
        for placement in self._table.place(requests):
            known = len(placement.request.prompt_ids) + len(placement.request.generated_ids)
            self._prefill_tokens += known - 1 - placement.reused
        if self._speculation is not None:
            self._speculation.start(requests)

    def step(self) -> list[TokenDelta]:
        version = self._loaded()
        live = [(row, slot) for row, slot in enumerate(self._table.slots) if slot is not None]
        drafts = self._drafts([slot for _, slot in live])
        if live and self._clock is not None and self._step_time_s is not None:
            self._clock.sleep(self._step_time_s(len(live)))
        deltas = [self._extend(row, slot, version, guessed) for (row, slot), guessed in zip(live, drafts, strict=True)]
        if self._speculation is not None and deltas:
            self._speculation.settle(deltas)
        return deltas

    def abort(self, responses: Sequence[int]) -> None:
        rows = self._table.responses
        for response in responses:
            if response in rows:
                self._table.leave(rows[response])
                if self._speculation is not None:
                    self._speculation.leave([response])

    def restart(self) -> None:
        self.close()

    def close(self) -> None:
        if self._speculation is not None:
            self._speculation.leave(list(self._table.responses))
        self._table = SlotTable(self._max_in_flight)
        self._version = None

    def scripted_length(self, noise_key: int) -> int:
        """The length of a response with this key under the loaded version, stop token included, if no limit ends it."""
        uniform = (_word(noise_key, _LENGTH, self._loaded()) + 1) / (_MASK + 2)
        deviation = NormalDist().inv_cdf(min(max(uniform, 1e-12), 1 - 1e-12))
        return max(1, round(self._median_length * math.exp(self._length_spread * deviation)))

    def _loaded(self) -> int:
        if self._version is None:
            raise EngineError("no weights are loaded; call load_weights first")
        return self._version

    def scripted_tokens(self, request: GenerationRequest, count: int) -> list[int]:
        """The next tokens of a response under the loaded version, if nothing ends it."""
        first, version = len(request.generated_ids), self._loaded()
        return [self._token(request, request.noise_key, first + ahead, version) for ahead in range(count)]

    def _drafts(self, live: Sequence[Slot]) -> Sequence[Sequence[int]]:
        """Equally many drafts for each response; none if no response could use one."""
        if self._speculation is None or not live:
            return [()] * len(live)
        room = max(tokens_left(slot.request, slot.generated, self._context_length) for slot in live) - 1
        return self._speculation.drafts([slot.request.response for slot in live], room, self._vocab_size)

    def _extend(self, row: int, slot: Slot, version: int, drafts: Sequence[int]) -> TokenDelta:
        return verified(drafts, self._drawn(slot, version, drafts), partial(self._append, row, slot))

    def _drawn(self, slot: Slot, version: int, drafts: Sequence[int]) -> Iterator[tuple[int, float]]:
        """Token and log-prob after the last token and after each draft."""
        request, first, key = slot.request, slot.generated, slot.request.noise_key
        for position, draft in enumerate((*drafts, -1), first):
            token = self._token(request, key, position, version)
            yield token, -5.0 * _word(key ^ _LOGPROB, position, version) / _MASK
            if token != draft:
                key = (key + _ASTRAY) & _MASK

    def _append(self, row: int, slot: Slot, token: int, logprob: float) -> TokenDelta:
        slot.token_ids.append(token)
        reason = finish_reason(slot.request, token, slot.generated, self._context_length)
        if reason is not None:
            self._table.leave(row)
        return TokenDelta(slot.request.response, (token,), (logprob,), reason)

    def _token(self, request: GenerationRequest, key: int, position: int, version: int) -> int:
        """The token that is drawn with this key; the response's own key is that of right tokens."""
        stops = request.sampling.stop_token_ids
        if stops:
            length = self.scripted_length(key)
            if position + 1 == length:
                return stops[0]
            if position >= length and _word(key ^ _TURN, position, version) % LATER_TURN == 0:
                return stops[0]
        token = _word(key, position, version) % self._vocab_size
        for _ in range(self._vocab_size):
            if token not in stops:
                break
            token = (token + 1) % self._vocab_size
        return token


def _word(key: int, position: int, version: int) -> int:
    """Hash (key, position, version) to 64 bits."""
    word = mix64((key + (version + 1) * _GAMMA) & _MASK)
    return mix64((word + (position + 1) * _GAMMA) & _MASK)
