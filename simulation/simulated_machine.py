"""The machine of a simulated member: an engine that takes time, straggles, hangs and dies."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from simulation.ledger import Ledger
from simulation.simulated_drafts import draw_speculation
from simulation.simulated_history import CONTEXT, PROMPT_TOKENS, SLOWEST_CLOCK, VOCABULARY, History
from simulation.simulated_step import version_of
from storage.clock import Clock
from storage.journal import journal
from storage.journal.shard import Row, decode_shard, encode_shard
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.engine import EngineDied, EngineError, GenerationRequest, TokenDelta
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.slot_table import SlotTable
from tasks.sampling.engines.speculation import Speculation

RESTART_FAILS = 0.2


class HangingEngine(ScriptedEngine):
    """A scripted engine that hangs in its next step for `hang_s`, and dies when `dies` returns True.

    `dies` is called with a probability after every step and every restart; a restart takes as long as a cold start.
    """

    def __init__(
        self,
        history: History,
        member: int | None,
        clock: Clock,
        dies: Callable[[float], bool],
        ledger: Ledger,
        name: str,
        holds: int | None = None,
    ) -> None:
        """member: None for the trainer's machine, which generates when no member lives.

        ledger: gets, under `name`, the returned tokens and the hangs of the engine. holds: the weight version left from
        an earlier iteration of the process.
        """
        self._speed = history.trainer_speed if member is None else history.speeds[member]
        super().__init__(
            VOCABULARY,
            history.in_flight,
            context_length=CONTEXT,
            median_length=history.median_length,
            clock=clock,
            step_time_s=lambda batch: self._speed.step_s(batch) + self._hang(),
        )
        self.hang_s = 0.0
        self._history = history
        self._member = member
        self._machine_clock = clock
        self._speculation = self._draw_speculation(name)
        self._dies = dies
        self._dead = False
        self._ledger = ledger
        self._name = name
        self._positions: dict[int, int] = {}
        if holds is not None:
            super().load_weights(holds, {})

    def enter(self, history: History, slot: int, dies: Callable[[float], bool], ledger: Ledger, name: str) -> None:
        """Serve another iteration, in which the process is the incarnation `name` and fills a slot.

        The weights stay; the history of the iteration draws everything else.
        """
        self._history, self._member, self._dies, self._ledger, self._name = history, slot, dies, ledger, name
        self._speed = history.speeds[slot % len(history.speeds)]
        self._median_length, self._max_in_flight = history.median_length, history.in_flight
        self._table, self._positions = SlotTable(history.in_flight), {}
        self._speculation = self._draw_speculation(name)

    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        self._check_alive()
        # Where there are tensors, they decide what is sampled, whatever they are called.
        super().load_weights(version_of(tensors) if tensors else version, tensors)

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        self._check_alive()
        super().start(requests)
        for request in requests:
            self._positions[request.response] = len(request.generated_ids)
            self._ledger.note_admitted(self._name, request.response)
        self._check_isolation()

    def step(self) -> list[TokenDelta]:
        self._check_alive()
        deltas = super().step()
        self._survive(self._history.engine_dies)
        for delta in deltas:
            self._ledger.note_decoded(self._name, delta.response, self._positions[delta.response], len(delta.token_ids))
            self._positions[delta.response] += len(delta.token_ids)
        return deltas

    def abort(self, responses: Sequence[int]) -> None:
        self._check_alive()
        super().abort(responses)

    def restart(self) -> None:
        self._machine_clock.sleep(self._history.cold_start_s[0])
        self._survive(RESTART_FAILS)
        self._dead = False
        super().restart()

    def _draw_speculation(self, name: str) -> Speculation | None:
        history = self._history
        if not history.drafts:
            return None
        return draw_speculation(
            history.seed,
            name,
            lambda request: self.scripted_tokens(request, request.sampling.max_completion_length),
            self._machine_clock,
            vocab_size=VOCABULARY,
            rows=history.in_flight,
            context_length=PROMPT_TOKENS + history.plan.sampling.max_completion_length,
        )

    def _check_isolation(self) -> None:
        """Check that the batch is no larger than the plan allows while a response of the slot's own unit is decoded."""
        plan, running = self._history.plan, self._table.responses
        if self._member is None or self._member >= len(plan.slots):
            return
        allowed = plan.slots[self._member].batch_max
        if allowed is not None and len(running) > allowed and set(plan.responses_of(self._member)) & set(running):
            raise EngineError(f"a batch of {len(running)}; allowed: {allowed}")

    def _survive(self, probability: float) -> None:
        if self._dies(probability):
            self._dead = True
            raise EngineDied("simulated")

    def _check_alive(self) -> None:
        if self._dead:
            raise EngineError("a dead engine was asked for more than to restart")

    def _hang(self) -> float:
        hang_s, self.hang_s = self.hang_s, 0.0
        if hang_s:
            now_s = self._ledger.now()
            self._ledger.note_trouble(self._name, now_s, now_s + hang_s / SLOWEST_CLOCK)
        return hang_s


class ShardMemory:
    """Encodes shards by the production code, and gives readers in the same process the original rows back.

    tests/storage/journal/test_shard.py proves the equality of decoded rows; here decoding would take half the time.
    """

    def __init__(self) -> None:
        self._rows: dict[bytes, list[Row]] = {}

    def encode(self, rows: Sequence[Row]) -> bytes:
        body = encode_shard(rows)
        self._rows[body] = list(rows)
        return body

    def decode(self, key: str, body: bytes) -> list[Row]:
        return self._rows[body] if body in self._rows else decode_shard(key, body)


@contextmanager
def shards_remembered() -> Iterator[ShardMemory]:
    """Within this context, the journals of the process share a memory of their shards."""
    memory, names = ShardMemory(), vars(journal)
    ours = {name: names[name] for name in ("encode_shard", "decode_shard")}
    names.update(encode_shard=memory.encode, decode_shard=memory.decode)
    try:
        yield memory
    finally:
        names.update(ours)
