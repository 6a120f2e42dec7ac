"""The journal of an iteration's scorers: a teacher's scores under claims, in the form of tokens under claims.

The scorers of an iteration write into a store of their own, laid out like a run's iteration, where each group is a unit
of the claims. A scored token stands there as `width_of` tokens with log-probs: the sampled token, then the teacher's
most likely tokens. So claims, shards, sealing and assembly are those of responses, and rules of a race hold for scores.

Scores begin with the identity of the response that the teacher reads, because a claim may void an end that a scorer has
read, and the response may then end otherwise. Such scores do not count: once a micro-batch has recorded the response,
the response is scored again, under a second number.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch
from blake3 import blake3

from storage.journal.assembly import Assembled, JournalReader
from storage.journal.claims import take_over
from storage.journal.journal import PARALLEL_READS, PendingRows
from storage.journal.shard import Finish, TokenIds
from storage.records import layout
from storage.records.records import PlanRecord, SlotPlan
from storage.records.teacher_scores import ScoredResponse
from storage.stores.memory import NestedStore
from storage.stores.store import CorruptObject, ObjectStore
from tasks.learning.distillation import TokenScores

# Of the plan's units here; no machine of this name exists.
_POOL = "scoring"
DIGITS = 32


def width_of(top_k: int) -> int:
    """How many tokens stand for a scored token; top_k is 0 without a head."""
    return 1 + max(1, top_k)


def score_store(store: ObjectStore, iteration: int) -> ObjectStore:
    """The store in which the scorers of an iteration meet."""
    return NestedStore(store, layout.scoring(iteration).rstrip("/"))


def score_plan(plan: PlanRecord) -> PlanRecord:
    """The plan whose units are the groups of `plan`, as the journal of scores follows it.

    A unit has each response twice: by its number for the scores of any tokens, and by the number plus
    `plan.num_responses` for the scores of recorded tokens where the first are of others.
    """
    groups = plan.num_groups
    slots = tuple(SlotPlan(slot=group, pool=_POOL, groups=(group, groups + group)) for group in range(groups))
    return replace(plan, slots=slots, weight_version=0, nonce=plan.nonce)


def identity(response: Assembled) -> bytes:
    """A digest of all that a teacher reads of a response: its tokens, and which of them are observations."""
    origins = np.array(response.origins, dtype=np.uint32)
    return blake3(response.token_ids.tobytes() + b"|" + origins.tobytes()).hexdigest()[:DIGITS].encode()


def policy_tokens(response: Assembled) -> TokenIds:
    """The tokens that the policy sampled in a response, observations left out."""
    is_policy = np.repeat(np.arange(len(response.origins)) % 2 == 0, response.origins)
    sampled: TokenIds = response.token_ids[is_policy]
    return sampled


@dataclass(frozen=True)
class ScorePlace:
    """Where the scores of a response stand, or are to stand.

    Attributes:
        number: The number of the response in the journal of scores.
        num_scored: How many tokens have scores that count.
        is_complete: Whether all tokens have.
    """

    number: int
    num_scored: int
    is_complete: bool


def append_scores(
    pending: PendingRows,
    number: int,
    epoch: int,
    sampled: TokenIds,
    scores: TokenScores,
    tokens: range,
    named: bytes,
) -> None:
    """Keep the scores of consecutive tokens of a response for the next shard.

    number: as in `ScorePlace`. sampled: the response's tokens as `policy_tokens` gives them. scores: of all tokens,
    with a head of at least one. named: the identity of the response, which comes ahead of the first token.
    """
    if not tokens.start:
        pending.append(number, epoch, 0, [], [], Finish.ACTING)
        pending.observe(number, epoch, 0, [], named, Finish.RUNNING)
    part = slice(tokens.start, tokens.stop)
    ids = torch.cat([torch.from_numpy(sampled.astype(np.int64))[part, None], scores.head_ids[part].long()], dim=1)
    logprobs = torch.cat([scores.logprobs[part, None], scores.head_logprobs[part]], dim=1).float()
    finish = Finish.STOP if tokens.stop == len(sampled) else Finish.RUNNING
    start = tokens.start * ids.shape[1]
    pending.append(number, epoch, start, ids.flatten().tolist(), logprobs.flatten().tolist(), finish)


class ScoreJournal:
    """Reads the journal of an iteration's scorers. Errors name keys of the run's own store.

    Attributes:
        store: The store of the scorers.
        plan: The plan that the journal follows.
        reader: Reads claims and shards.
    """

    def __init__(self, store: ObjectStore, plan: PlanRecord, top_k: int, parallel_reads: int = PARALLEL_READS) -> None:
        """top_k: the size of the heads; 0 without."""
        self.store = score_store(store, plan.iteration)
        self.plan = score_plan(plan)
        self.reader = JournalReader(self.store, self.plan, parallel_reads)
        self._top_k = top_k

    def refresh(self) -> None:
        """Read new claims and all new shards; raises CorruptObject."""
        with self._keys_of_run():
            self.reader.refresh()

    def look_at(self, group: int) -> None:
        """Read the shards that can still change the scores of a group; raises CorruptObject."""
        with self._keys_of_run():
            numbers = self.plan.responses_of(group)
            self.reader.shards.advance_all(self.reader.incarnations_to_read(numbers))

    def claim(self, group: int, incarnation: str, scorer: int) -> bool:
        """Claim a group that has no owner, or whose owner is lost; False if another claim came first.

        Raises CorruptObject.
        """
        book = self.reader.book
        with self._keys_of_run():
            return take_over(
                self.store,
                self.plan,
                book,
                self.reader.shards,
                unit=group,
                incarnation=incarnation,
                slot=scorer,
                predecessors={owner.incarnation for owner in book.owners_of(group)},
            )

    def is_held_by(self, group: int, incarnation: str) -> bool:
        """Whether an incarnation owns a group, after a look for newer claims; raises CorruptObject."""
        book = self.reader.book
        with self._keys_of_run():
            book.probe(group)
        return {owner.incarnation for owner in book.owners_of(group)} == {incarnation}

    @property
    def progress(self) -> int:
        """A number that grows with every claim and every shard that was read."""
        return self.reader.progress

    def place(self, response: int, named: bytes, *, is_recorded: bool) -> ScorePlace | None:
        """Where the scores of a response with this identity stand, as far as was read; raises CorruptObject.

        None while scores of other tokens stand there, and no micro-batch has recorded the response.
        """
        if not is_recorded and not self._fits(self._found(response), named):
            return None
        return self._placed(response, named)[0]

    def scored(self, response: int, teacher: str, tokens: Assembled) -> ScoredResponse | None:
        """The scores of a recorded response by a teacher; None while tokens lack scores.

        tokens: the response. Raises CorruptObject, which names the last shard, if the scores are of other tokens than
        their identity says, or not finite.
        """
        place, found = self._placed(response, identity(tokens))
        if not place.is_complete:
            return None
        ids = found.token_ids.reshape(place.num_scored, width_of(self._top_k))
        logprobs = found.logprobs.reshape(ids.shape)
        if not np.array_equal(ids[:, 0], policy_tokens(tokens)):
            raise CorruptObject(self._key(found), f"the scores of response {response} are of other tokens than its own")
        if not np.isfinite(logprobs).all():
            raise CorruptObject(self._key(found), f"the scores of response {response} are not finite")
        head = slice(1, 1 + self._top_k)
        return ScoredResponse(
            response,
            teacher,
            logprobs[:, 0].copy(),
            ids[:, 0] == ids[:, 1],
            ids[:, head].copy(),
            logprobs[:, head].copy(),
        )

    def _placed(self, response: int, named: bytes) -> tuple[ScorePlace, Assembled]:
        for number in (response, response + self.plan.num_responses // 2):
            found = self._found(number)
            if self._fits(found, named):
                return ScorePlace(number, self._rows(found), found.finish.ends_response), found
        reason = f"the scores of response {response} are of other tokens than its micro-batch has"
        raise CorruptObject(self._key(found), reason)

    def _found(self, number: int) -> Assembled:
        with self._keys_of_run():
            return self.reader.assemble(number)

    def _fits(self, found: Assembled, named: bytes) -> bool:
        return not found.lineage or found.events == (named,)

    def _rows(self, found: Assembled) -> int:
        rows, rest = divmod(len(found.token_ids), width_of(self._top_k))
        if rest:
            reason = (
                f"the scores of response {found.response} have heads of another number of tokens than teacher.top_k"
            )
            raise CorruptObject(self._key(found), reason)
        return rows

    def _key(self, found: Assembled) -> str:
        last = found.lineage[-1]
        return self._of_run(layout.shard(self.plan.iteration, last.incarnation, last.last_sequence))

    def _of_run(self, key: str) -> str:
        return layout.scoring(self.plan.iteration) + key

    @contextmanager
    def _keys_of_run(self) -> Iterator[None]:
        try:
            yield
        except CorruptObject as error:
            raise CorruptObject(self._of_run(error.key), error.reason) from error
