"""The journal of an iteration's scorers: a teacher's scores under claims, in the form of tokens under claims.

The scorers of an iteration write into a store of their own, laid out like a run's iteration, where each group is a unit
of the claims. A scored token stands there as `width_of` tokens with log-probs: the sampled token, then the teacher's
most likely tokens. So claims, shards, sealing and assembly are those of responses, and rules of a race hold for scores.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

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


def width_of(top_k: int) -> int:
    """How many tokens stand for a scored token; top_k is 0 without a head."""
    return 1 + max(1, top_k)


def score_store(store: ObjectStore, iteration: int) -> ObjectStore:
    """The store in which the scorers of an iteration meet."""
    return NestedStore(store, layout.scoring(iteration).rstrip("/"))


def score_plan(plan: PlanRecord) -> PlanRecord:
    """The plan whose units are the groups of `plan`, as the journal of scores follows it."""
    slots = tuple(SlotPlan(slot=group, pool=_POOL, groups=(group,)) for group in range(plan.num_groups))
    return replace(plan, slots=slots, weight_version=0, nonce=plan.nonce)


def policy_tokens(response: Assembled) -> TokenIds:
    """The tokens that the policy sampled in a response, observations left out."""
    is_policy = np.repeat(np.arange(len(response.origins)) % 2 == 0, response.origins)
    sampled: TokenIds = response.token_ids[is_policy]
    return sampled


def append_scores(
    pending: PendingRows, response: int, epoch: int, sampled: TokenIds, scores: TokenScores, tokens: range
) -> None:
    """Keep the scores of consecutive tokens of a response for the next shard.

    sampled: the response's tokens as `policy_tokens` gives them. scores: of all tokens, with a head of at least one.
    """
    part = slice(tokens.start, tokens.stop)
    ids = torch.cat([torch.from_numpy(sampled.astype(np.int64))[part, None], scores.head_ids[part].long()], dim=1)
    logprobs = torch.cat([scores.logprobs[part, None], scores.head_logprobs[part]], dim=1).float()
    finish = Finish.STOP if tokens.stop == len(sampled) else Finish.RUNNING
    start = tokens.start * ids.shape[1]
    pending.append(response, epoch, start, ids.flatten().tolist(), logprobs.flatten().tolist(), finish)


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

    def look_at(self, responses: Sequence[int]) -> None:
        """Read the shards that can still change the scores of some responses; raises CorruptObject."""
        with self._keys_of_run():
            self.reader.shards.advance_all(self.reader.incarnations_to_read(responses))

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

    def num_scored(self, response: int) -> int:
        """How many tokens of a response have scores that count, as far as was read; raises CorruptObject."""
        with self._keys_of_run():
            found = self.reader.assemble(response)
        return self._rows(found)

    def is_complete(self, response: int) -> bool:
        """Whether every token of a response has scores that count, as far as was read; raises CorruptObject."""
        with self._keys_of_run():
            return self.reader.assemble(response).finish.ends_response

    def scored(self, response: int, teacher: str, sampled: TokenIds) -> ScoredResponse | None:
        """The scores of a response by a teacher; None while tokens lack scores.

        sampled: the tokens of the response. Raises CorruptObject, which names the last shard, if the scores are of
        other tokens, or not finite.
        """
        with self._keys_of_run():
            found = self.reader.assemble(response)
        rows = self._rows(found)
        if not found.finish.ends_response:
            return None
        ids = found.token_ids.reshape(rows, width_of(self._top_k))
        logprobs = found.logprobs.reshape(ids.shape)
        if not np.array_equal(ids[:, 0], sampled):
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
