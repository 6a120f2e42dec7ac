"""Assembly: builds the one result of each response from the claims and the shards (docs/format.md algorithm R).

The result is unique whatever else lies in the journal: void rows of frozen members, unsealed shards, lost races.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.journal.claims import ClaimBook
from storage.journal.journal import PARALLEL_READS, ShardReader
from storage.journal.shard import Finish, Logprobs, Origin, Row, TokenIds
from storage.records import layout
from storage.records.records import PlanRecord, Span
from storage.stores.store import CorruptObject, ObjectStore


@dataclass(frozen=True, slots=True)
class Assembled:
    """The durable part of a response: its tokens, and the claims behind them.

    Attributes:
        token_ids: uint32 [n].
        logprobs: float32 [m], of the tokens that the policy sampled.
        lineage: spans of shards that the tokens came from, in order.
        span_tokens: number of tokens from each span of the lineage; the sum is n.
        weight_versions: uint32 [n], the version that sampled a token or was in place when an observation was added.
        origins: lengths of the stretches of tokens by the policy, an observation, the policy, and so on; the sum is n,
            the sum of the policy's stretches m. Without turns: (n,).
        events: answers to the policy's turns, in order, encoded as in storage.journal.turns.
        owes: True while a finished turn of the policy is unanswered.
        restarts: number of times the response began again; only tokens after the last restart are here.
    """

    response: int
    token_ids: TokenIds
    logprobs: Logprobs
    finish: Finish
    lineage: tuple[Span, ...]
    span_tokens: tuple[int, ...]
    weight_versions: npt.NDArray[np.uint32]
    origins: tuple[int, ...]
    events: tuple[bytes, ...]
    owes: bool
    restarts: int

    @property
    def turn_start(self) -> int:
        """The position at which the policy's present turn began, or is to begin."""
        return len(self.token_ids) - (self.origins[-1] if len(self.origins) % 2 else 0)

    @property
    def policy_length(self) -> int:
        """The number of tokens that the policy sampled."""
        return sum(self.origins[::2])


class _Tokens:
    """The rows of a response since its last restart, in order."""

    def __init__(self, restarts: int = 0) -> None:
        self.restarts = restarts
        self.token_ids: list[TokenIds] = []
        self.logprobs: list[Logprobs] = []
        self.versions: list[npt.NDArray[np.uint32]] = []
        self.origins = [0]
        self.events: list[bytes] = []
        self.owes = False
        self.finish = Finish.RUNNING

    @property
    def length(self) -> int:
        return sum(self.origins)

    def add(self, row: Row) -> None:
        """Append a row that may follow."""
        self.token_ids.append(row.token_ids)
        self.logprobs.append(row.logprobs)
        self.versions.append(np.full(len(row.token_ids), row.weight_version, dtype=np.uint32))
        # Stretches alternate, the policy's first.
        if len(row.token_ids):
            if (len(self.origins) - 1) % 2 != row.origin:
                self.origins.append(0)
            self.origins[-1] += len(row.token_ids)
        if row.event is not None:
            self.events.append(row.event)
        if row.finish is Finish.ACTING:
            self.owes = True
        elif row.origin is Origin.OBSERVATION:
            self.owes = False
        self.finish = row.finish

    def problem(self, row: Row, weight_version: int) -> str | None:
        """Why a row of this response cannot follow."""
        name = f"response {row.response}"
        if self.finish.ends_response:
            return f"it extends {name}, which had ended"
        if row.start != self.length:
            return f"{name} continues at {row.start}, expected {self.length}"
        if row.weight_version != weight_version:
            return f"{name} was sampled from weight version {row.weight_version}, the plan names {weight_version}"
        if row.origin is Origin.OBSERVATION and not self.owes:
            return f"{name} has an observation where the policy has the turn"
        if row.origin is Origin.POLICY and self.owes and (len(row.token_ids) or row.finish is not Finish.RELEASED):
            return f"{name} goes on although its turn is not answered"
        return None


class JournalReader:
    """Follows an iteration: `refresh` reads what is new, `assemble` answers from what was read."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        parallel_reads: int = PARALLEL_READS,
        parts: Sequence[range] | None = None,
    ) -> None:
        """parts: ranges of responses to hold in memory in turn, beginning with the first; None: hold all responses."""
        self._plan = plan
        self._parts = parts
        self.book = ClaimBook(store, plan, parallel_reads)
        kept = parts[0] if parts else None
        self.shards = ShardReader(store, plan.iteration, parallel_reads, kept)

    def refresh(self) -> None:
        """Read the claims and shards that are new."""
        self.book.refresh()
        self.shards.advance_all(self.book.incarnations)

    @property
    def progress(self) -> int:
        """A number that grows with every claim and every shard that was read."""
        return self.book.version + sum(self.shards.last_sequence(name) + 1 for name in self.book.incarnations)

    def parts(self) -> Iterator[range]:
        """Each part in turn, when its rows are in memory; without parts, all responses of the plan at once.

        Raises ObjectMissing for a shard that was deleted since it was first read, and CorruptObject.
        """
        for part in self._parts or ():
            self.shards.turn_to(part)
            yield part
        if not self._parts:
            yield range(self._plan.num_responses)

    def incarnations_to_read(self, responses: Sequence[int]) -> list[str]:
        """The incarnations whose shards can still change these responses (docs/format.md algorithm R).

        These are the holders of the responses, and earlier owners with unread sealed shards. Rows of any other
        incarnation are void.
        """
        names = self.book.holders(responses)
        for response in self.book.handed_over(responses):
            for span in self.book.sealed(response):
                if span.last_sequence > self.shards.last_sequence(span.incarnation):
                    names[span.incarnation] = None
        return list(names)

    def assemble(self, response: int) -> Assembled:
        """The response along its chain of claims; raises CorruptObject for a gap, an overlap or a foreign version."""
        return self.follow(response, self._lineage(response))

    def is_at_hand(self, response: int) -> bool:
        """Whether `assemble` needs no request: all that claims have sealed of the response is read."""
        shards = self.shards
        return all(shards.last_sequence(s.incarnation) >= s.last_sequence for s in self.book.sealed(response))

    def has_ended(self, response: int) -> bool:
        """Whether an end mark that was read counts, which needs no rows in memory."""
        reached = {(span.incarnation, span.epoch): span.last_sequence for span in self._lineage(response)}
        return any(number <= reached.get((name, epoch), -1) for name, epoch, number in self.shards.ends(response))

    def _lineage(self, response: int) -> tuple[Span, ...]:
        lineage, owner = self.book.sealed(response), self.book.owner(response)
        if owner is None:
            return lineage
        last = self.shards.last_sequence(owner.incarnation)
        return (*lineage, Span(epoch=owner.epoch, incarnation=owner.incarnation, last_sequence=last))

    def _reach(self, span: Span) -> None:
        """Read up to the span's last shard: a claim that won a race against ours may seal more than we had read."""
        if self.shards.last_sequence(span.incarnation) >= span.last_sequence:
            return
        last = self.shards.advance(span.incarnation)
        if last < span.last_sequence:
            key = layout.shard(self._plan.iteration, span.incarnation, last + 1)
            raise CorruptObject(key, f"it is gone, although shards up to {span.last_sequence} were sealed or consumed")

    def follow(self, response: int, lineage: Sequence[Span]) -> Assembled:
        """The response along a recorded lineage; a restarted trainer replays it so."""
        tokens = _Tokens()
        used: list[Span] = []
        span_tokens: list[int] = []
        for span in lineage:
            self._reach(span)
            last_used, before = -1, tokens.length
            for sequence, row in self.shards.rows(span.incarnation, span.epoch, response):
                if sequence > span.last_sequence:
                    break
                if problem := tokens.problem(row, self._plan.weight_version):
                    raise CorruptObject(layout.shard(self._plan.iteration, span.incarnation, sequence), problem)
                last_used = sequence
                if row.finish is Finish.AGAIN:
                    tokens, before = _Tokens(tokens.restarts + 1), 0
                    span_tokens = [0] * len(span_tokens)
                else:
                    tokens.add(row)
            if last_used >= 0:
                used.append(Span(epoch=span.epoch, incarnation=span.incarnation, last_sequence=last_used))
                span_tokens.append(tokens.length - before)
        assembled = Assembled(
            response,
            np.concatenate(tokens.token_ids) if tokens.token_ids else np.zeros(0, dtype=np.uint32),
            np.concatenate(tokens.logprobs) if tokens.logprobs else np.zeros(0, dtype=np.float32),
            tokens.finish,
            tuple(used),
            tuple(span_tokens),
            np.concatenate(tokens.versions) if tokens.versions else np.zeros(0, dtype=np.uint32),
            tuple(tokens.origins),
            tuple(tokens.events),
            tokens.owes,
            tokens.restarts,
        )
        assert len(assembled.token_ids) == tokens.length, f"response {response} is not whole"
        assert len(assembled.logprobs) == assembled.policy_length, f"response {response} lacks log-probs"
        assert sum(span_tokens) == tokens.length, f"response {response}: its spans are not all of it"
        assert len(used) <= len(lineage), f"response {response} has spans that no claim gave it"
        return assembled


def unended_responses(store: ObjectStore, plan: PlanRecord) -> list[int]:
    """The responses of a plan that have not ended in the journal now; holds no token of them in memory."""
    reader = JournalReader(store, plan, parts=(range(0),))
    reader.refresh()
    return [response for response in range(plan.num_responses) if not reader.has_ended(response)]
