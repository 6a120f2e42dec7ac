"""Scoring: the teachers' scores of a micro-batch, stored before use, so that a later attempt asks no teacher again.

All ranks score together, each a part of the responses; with `teacher.pool` the first rank waits for the pool's scorers
instead. The first stored object wins, and every rank reads its bits.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from resources.work_log import at_work
from storage.records import layout
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse, PlanRecord
from storage.records.run import exists
from storage.records.teacher_scores import ScoredResponse, decode_scores, encode_scores
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, commit
from tasks.configuration.teacher import TeacherConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.awaited_scores import AwaitedScores
from tasks.learning.batching import TokenBatch, is_idle
from tasks.learning.distillation import Taught, TokenScores, joined
from tasks.learning.forward_passes import ForwardPasses
from tasks.learning.learner import Learner
from tasks.learning.nonfinite import finite_together
from tasks.learning.optimizer import NonFiniteGradient
from tasks.learning.packing import is_packed
from tasks.learning.recorded_batches import BatchReader
from tasks.learning.teachers import Teacher, Teachers

Scores = Mapping[int, TokenScores]


@dataclass(frozen=True)
class TeacherScoring:
    """Callable: a recorded micro-batch -> the scores of its responses by number, equal on every rank.

    Attributes:
        store: The run's store.
        plan: The iteration's plan.
        prompts: The iteration's prompts, by group.
        reader: Reads the tokens of recorded responses.
        learner: Its policy, teachers and ranks are used.
        config: The section `teacher`.
        trainer: micro_batch_tokens_max is used.
        awaited: What waits for scorers on the first rank; None on the others, and where the ranks score themselves.
        is_replay: Whether the iteration is trained already, so that no scorer comes any more.
    """

    store: ObjectStore
    plan: PlanRecord
    prompts: Sequence[PromptRow]
    reader: BatchReader
    learner: Learner
    config: TeacherConfig
    trainer: TrainerConfig
    awaited: AwaitedScores | None = None
    is_replay: bool = False

    @property
    def waited_s(self) -> float:
        """Seconds spent waiting for scorers."""
        return 0.0 if self.awaited is None else self.awaited.waited_s

    def __call__(self, batch: BatchRecord) -> dict[int, TokenScores]:
        """Read the stored scores, or ask the teachers and store their scores; every rank must call with equal batches.

        Raises NonFiniteGradient for a teacher's log-prob that is not finite, CorruptObject for scores that do not fit
        the batch, ValueError for a prompt without a teacher, GroupTimeout without a scorer, ObjectMissing for scores of
        a pool that a replay no longer finds, and the errors of `Teachers.named`.
        """
        scored = [graded for graded in batch.responses if graded.finish_reason != "failed"]
        if not scored:
            return {}
        ranks, key = self.learner.ranks, layout.teacher_scores(self.plan.iteration, batch.number)
        with ranks.failing_together():
            is_known = ranks.is_first and exists(self.store, key)
        if not ranks.broadcast(is_known):
            at_work(f"asking the teacher about micro-batch {batch.number}")
            rows = self._asked(scored) if self.config.pool is None else self._of_pool(key, scored)
            with ranks.failing_together():
                if ranks.is_first:
                    commit(self.store, key, encode_scores(rows))
        with ranks.failing_together():
            return self._read(key, scored)

    def taught(self, batch: TokenBatch, scores: Scores) -> Taught:
        """The scores of a pass."""
        return Taught(self.config, joined([scores[response] for response in batch.responses]))

    def _read(self, key: str, scored: Sequence[GradedResponse]) -> dict[int, TokenScores]:
        rows = decode_scores(key, self.store.get(key))
        expected = [(graded.response, graded.policy_length) for graded in scored]
        if [(row.response, len(row.logprobs)) for row in rows] != expected:
            raise CorruptObject(key, "its responses, or their lengths, are not those of its micro-batch")
        if any(row.head_ids.shape[1] != self._top_k for row in rows):
            raise CorruptObject(key, f"it has heads of another number of tokens than teacher.top_k {self.config.top_k}")
        return {row.response: _as_torch(row) for row in rows}

    def _of_pool(self, key: str, scored: Sequence[GradedResponse]) -> list[ScoredResponse]:
        """The scorers' scores, in the order of `scored`, on the first rank; none on the others.

        A replay raises ObjectMissing, which names the lost object `key`, unless the scorers' shards are still there.
        """
        rows: list[ScoredResponse] = []
        if self.is_replay:
            with self.learner.ranks.failing_together():
                if self.awaited is not None:
                    found = self.awaited.at_hand(scored, self._names(scored))
                    if found is None:
                        raise ObjectMissing(key)
                    rows = found
            return rows
        if self.awaited is not None:
            rows = self.awaited(scored, self._names(scored))
        # The first rank may have waited for hours.
        self.learner.ranks.meet()
        return rows

    def _names(self, scored: Sequence[GradedResponse]) -> list[str]:
        size = self.plan.num_generations
        return [self.config.teacher_of(self.prompts[graded.response // size].columns) for graded in scored]

    def _asked(self, scored: Sequence[GradedResponse]) -> list[ScoredResponse]:
        """The teachers' scores, in the order of `scored`, on every rank."""
        names = self._names(scored)
        found: dict[int, TokenScores] = {}
        for name in dict.fromkeys(names):
            own = [graded for graded, teacher in zip(scored, names, strict=True) if teacher == name]
            found |= self._by(_teachers(self.learner).named(name), own)
        return [
            _as_numpy(graded.response, name, found[graded.response]) for graded, name in zip(scored, names, strict=True)
        ]

    def _by(self, teacher: Teacher, scored: Sequence[GradedResponse]) -> dict[int, TokenScores]:
        """The scores by one teacher, on every rank."""
        ranks, tokens_max = self.learner.ranks, self.trainer.micro_batch_tokens_max
        passes = ForwardPasses(
            self.reader, self.plan, self.prompts, tokens_max, ranks, packed=is_packed(teacher.module)
        )
        found: dict[int, TokenScores] = {}
        # Alone a rank makes the passes of a scorer, which has a group at a time, and so gets the same bits.
        parts = by_group(scored, self.plan.num_generations) if ranks.world_size == 1 else [list(scored)]
        for batch in (each for part in parts for each in passes(part)):
            scores = teacher.scores(batch, self.plan.sampling.temperature, self._top_k, self._vocabulary)
            with finite_together(ranks):
                if not is_idle(batch):
                    found |= by_response(scores, batch)
        gathered = {
            name: ranks.gather_rows({number: row.reshape(-1) for number, row in rows.items()}, torch.float64)
            for name, rows in _by_field(found).items()
        }
        return {graded.response: _joined(gathered, graded.response, graded.policy_length) for graded in scored}

    @property
    def _top_k(self) -> int:
        return self.config.head_size(self._vocabulary)

    @property
    def _vocabulary(self) -> int:
        rows: int = self.learner.policy.module.get_input_embeddings().weight.shape[0]
        return rows


def _teachers(learner: Learner) -> Teachers:
    if learner.teachers is None:
        raise ValueError("teacher: given; allowed: nothing for a learner without teachers")
    return learner.teachers


def by_group(responses: Sequence[GradedResponse], size: int) -> list[list[GradedResponse]]:
    """The responses of each group, in order. size: responses in a group."""
    groups: dict[int, list[GradedResponse]] = {}
    for graded in responses:
        groups.setdefault(graded.response // size, []).append(graded)
    return list(groups.values())


def by_response(scores: TokenScores, batch: TokenBatch) -> dict[int, TokenScores]:
    """The scores of a pass for each response; raises NonFiniteGradient, which names the responses."""
    parts = zip(*(each.split(list(batch.trained_lengths)) for each in vars(scores).values()), strict=True)
    found = {response: TokenScores(*part) for response, part in zip(batch.responses, parts, strict=True)}
    logprobs = {number: (each.logprobs, each.head_logprobs.flatten()) for number, each in found.items()}
    spoilt = [number for number, rows in logprobs.items() if not bool(torch.isfinite(torch.cat(rows)).all())]
    if spoilt:
        raise NonFiniteGradient("log-prob of the teacher", spoilt)
    return found


def _by_field(found: Scores) -> dict[str, dict[int, torch.Tensor]]:
    """The rows of each field as float64, in which every value is exact."""
    names = ("logprobs", "agrees", "head_ids", "head_logprobs")
    return {name: {number: getattr(each, name).double() for number, each in found.items()} for name in names}


def _joined(gathered: Mapping[str, Mapping[int, torch.Tensor]], response: int, tokens: int) -> TokenScores:
    own = {name: rows[response] for name, rows in gathered.items()}
    shape = (tokens, len(own["head_ids"]) // tokens)
    return TokenScores(
        own["logprobs"].float(),
        own["agrees"].bool(),
        own["head_ids"].long().view(shape),
        own["head_logprobs"].float().view(shape),
    )


def _as_numpy(response: int, teacher: str, scores: TokenScores) -> ScoredResponse:
    return ScoredResponse(
        response,
        teacher,
        scores.logprobs.float().numpy(),
        scores.agrees.numpy(),
        scores.head_ids.numpy().astype(np.uint32),
        scores.head_logprobs.float().numpy(),
    )


def _as_torch(row: ScoredResponse) -> TokenScores:
    arrays = row.logprobs, row.agrees, row.head_ids.astype(np.int32), row.head_logprobs
    return TokenScores(*(torch.tensor(each) for each in arrays))
