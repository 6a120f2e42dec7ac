"""Assembly: builds the one result of each response from the claims and the shards (docs/format.md algorithm R).

The result is unique whatever else lies in the journal: void rows of frozen members, unsealed shards, lost races. The
format can hold conversations with environments; what is assembled here never does.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage import layout
from storage.claims import ClaimBook
from storage.journal import PARALLEL_READS, ShardReader
from storage.records import PlanRecord, Span
from storage.shard import Finish, Logprobs, Origin, Row, TokenIds
from storage.store import CorruptObject, ObjectStore


@dataclass(frozen=True, slots=True)
class Assembled:
    """A response as far as it is durable: uint32 token_ids [n], float32 logprobs [n], and the spans they came from.

    weight_versions: uint32 [n], the version that sampled each token.
    """

    response: int
    token_ids: TokenIds
    logprobs: Logprobs
    finish: Finish
    lineage: tuple[Span, ...]
    weight_versions: npt.NDArray[np.uint32]


def with_environment(response: int) -> str:
    """Why a response that holds answers of an environment, or waits for one, is refused."""
    return f"response {response} has turns of an environment; this version has no environments"


class JournalReader:
    """Follows an iteration: `refresh` reads what is new, `assemble` answers from what was read."""

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        parallel_reads: int = PARALLEL_READS,
        parts: Sequence[range] | None = None,
    ) -> None:
        """parts: only the rows of one of these parts are in memory, at first of the first; None: of all responses."""
        self._plan = plan
        self._parts = parts
        self.book = ClaimBook(store, plan, parallel_reads)
        kept = parts[0] if parts else None
        self.shards = ShardReader(store, plan.iteration, parallel_reads, kept)

    def refresh(self) -> None:
        """Read the claims and shards that are new."""
        self.book.refresh()
        self.shards.advance_all(self.book.incarnations)

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

        They are the incarnations that hold the responses, and those whose sealed shards were not all read yet. No
        reader takes what other incarnations write.
        """
        names = self.book.holders(responses)
        for response in self.book.handed_over(responses):
            for span in self.book.sealed(response):
                if span.last_sequence > self.shards.last_sequence(span.incarnation):
                    names[span.incarnation] = None
        return list(names)

    def assemble(self, response: int) -> Assembled:
        """The response along its chain of claims; raises CorruptObject for a gap, an overlap or a foreign version."""
        lineage = self.book.sealed(response)
        owner = self.book.owner(response)
        if owner is not None:
            last = self.shards.last_sequence(owner.incarnation)
            lineage = (*lineage, Span(epoch=owner.epoch, incarnation=owner.incarnation, last_sequence=last))
        return self.follow(response, lineage)

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
        token_ids: list[TokenIds] = []
        logprobs: list[Logprobs] = []
        versions: list[npt.NDArray[np.uint32]] = []
        used: list[Span] = []
        length, finish = 0, Finish.RUNNING
        for span in lineage:
            self._reach(span)
            last_used = -1
            for sequence, row in self.shards.rows(span.incarnation, span.epoch, response):
                if sequence > span.last_sequence:
                    break
                if problem := self._problem(row, length, finish):
                    raise CorruptObject(layout.shard(self._plan.iteration, span.incarnation, sequence), problem)
                token_ids.append(row.token_ids)
                logprobs.append(row.logprobs)
                versions.append(np.full(len(row.token_ids), row.weight_version, dtype=np.uint32))
                length += len(row.token_ids)
                finish, last_used = row.finish, sequence
            if last_used >= 0:
                used.append(Span(epoch=span.epoch, incarnation=span.incarnation, last_sequence=last_used))
        assembled = Assembled(
            response,
            np.concatenate(token_ids) if token_ids else np.zeros(0, dtype=np.uint32),
            np.concatenate(logprobs) if logprobs else np.zeros(0, dtype=np.float32),
            finish,
            tuple(used),
            np.concatenate(versions) if versions else np.zeros(0, dtype=np.uint32),
        )
        assert len(assembled.token_ids) == len(assembled.logprobs) == length, f"response {response} is not whole"
        assert len(used) <= len(lineage), f"response {response} has spans that no claim gave it"
        return assembled

    def _problem(self, row: Row, length: int, finish: Finish) -> str | None:
        """Why a row cannot follow `length` tokens of its response, of which the last row said `finish`."""
        if row.origin is not Origin.POLICY or row.finish in (Finish.ACTING, Finish.FAILED):
            return with_environment(row.response)
        if finish.ends_response:
            return f"it extends response {row.response}, which had ended"
        if row.start != length:
            return f"response {row.response} continues at {row.start}, expected {length}"
        if row.weight_version != self._plan.weight_version:
            version = f"{row.weight_version}, the plan names {self._plan.weight_version}"
            return f"response {row.response} was sampled from weight version {version}"
        return None
