"""Score session: one incarnation of a scorer, which claims groups as they end and journals the teacher's scores.

A scorer takes free groups in the order of the plan: groups without a claim, and groups of a scorer that no longer
lives. Each pass of the teacher is over a group's responses, as in the trainer's process, and its scores are written in
shards. The successor of a killed scorer makes the unfinished pass again, and writes from the first token without a
score on.
"""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from resources.process import started_at_s
from resources.work_log import at_work
from storage.clock import Clock
from storage.journal.assembly import Assembled
from storage.journal.journal import JournalWriter, PendingRows
from storage.journal.liveness import Liveness, MemberSign
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse, PlanRecord
from storage.records.run import exists, is_trained, read_run
from storage.stores.store import ObjectStore
from storage.waiting import Wait
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.learning.distillation import TokenScores
from tasks.learning.forward_passes import ForwardPasses
from tasks.learning.packing import is_packed
from tasks.learning.ranks import Ranks
from tasks.learning.recorded_batches import BatchReader
from tasks.learning.score_journal import ScoreJournal, append_scores, policy_tokens
from tasks.learning.teacher_scoring import by_response
from tasks.learning.teachers import Teacher, Teachers
from tasks.learning.vllm_teachers import VllmTeachers
from tasks.sampling.session.session_outcome import Preempted

log = logging.getLogger(__name__)
# With a head of 64 tokens, a shard has 2 MB.
SHARD_TOKENS = 4096


class EndedGroups(BatchReader):
    """The groups of an iteration whose responses have all ended, with their tokens."""

    def look(self) -> None:
        """Read what is new in the journal."""
        self._reader.refresh()

    @property
    def progress(self) -> int:
        """A number that grows with every claim and every shard that was read."""
        return self._reader.progress

    def responses(self, group: int) -> list[GradedResponse] | None:
        """The group's responses that a teacher scores, with rewards of 0; None while one of them has not ended."""
        size = self._plan.num_generations
        numbers = range(group * size, (group + 1) * size)
        if not all(map(self._reader.has_ended, numbers)):
            return None
        found = [self._reader.assemble(number) for number in numbers]
        return [_ungraded(each) for each in found if each.finish is not Finish.FAILED]


def _ungraded(response: Assembled) -> GradedResponse:
    return GradedResponse(
        response=response.response,
        length=len(response.token_ids),
        policy_length=response.policy_length,
        finish_reason="stop" if response.finish is Finish.STOP else "length",
        lineage=response.lineage,
        reward=0.0,
        rewards={},
    )


@dataclass
class _Held:
    """What the heartbeat tells: claims made, responses of the group in work, its own number, and "gone"."""

    claims: int = 0
    unfinished: int = 0
    beats: int = 0
    is_gone: bool = False


class ScoreSession:
    """One incarnation of a scorer in one iteration.

    Attributes:
        incarnation: Its name.
        num_scored: Responses whose scores it has completed.
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        config: RunConfig,
        teacher: TeacherConfig,
        ranks: Ranks,
        scorer: int,
        clock: Clock,
        notice: Callable[[], bool],
        shard_tokens: int = SHARD_TOKENS,
    ) -> None:
        """scorer: the number of this machine in its pool. ranks: one, on the device of the teachers.

        shard_tokens: the most tokens whose scores one shard holds.
        """
        self.incarnation = f"{scorer:05d}-{uuid.uuid4().hex[:16]}"
        self.num_scored = 0
        self._run, self._plan, self._prompts = store, plan, prompts
        self._config, self._teacher, self._ranks = config, teacher, ranks
        self._scorer, self._clock, self._notice = scorer, clock, notice
        self._shard_tokens = shard_tokens
        self._vocabulary = read_run(store).vocab_size
        self._ended = EndedGroups(store, plan)
        self._journal = ScoreJournal(store, plan, teacher.head_size(self._vocabulary))
        self._liveness = Liveness(self._journal.store, plan.iteration, clock)
        self._writer = JournalWriter(self._journal.store, plan.iteration, self.incarnation, 0)
        self._teachers = (
            VllmTeachers(store, config, teacher, self._vocabulary)
            if teacher.engine == "vllm"
            else Teachers(store, config.trainer, ranks)
        )
        self._open, self._closed = set(range(plan.num_groups)), False
        self._held, self._lock = _Held(), threading.Lock()
        # Earlier processes of this scorer, which have ended. One that claims later may live, as a successor does.
        self._predecessors: frozenset[str] | None = None

    def run(self) -> int:
        """Score until nothing is left to score; returns the number of responses completed.

        Raises Preempted after a notice, NonFiniteGradient for log-probs that are not finite, CorruptObject, and the
        errors of `Teachers.named` or, with vLLM, of `VllmTeachers.named`.
        """
        if self._is_over():
            return 0
        limit_s = self._config.trainer.group_timeout_s
        waiting = Wait("groups to end", self._clock, limit_s, "then this scorer leaves (trainer.group_timeout_s)")
        at_work(f"scoring iteration {self._plan.iteration} as {self.incarnation}", self.in_words)
        self.beat()
        seen = 0
        try:
            if isinstance(self._teachers, VllmTeachers):
                # While responses are being generated, because vLLM takes minutes to start.
                self._teachers.start(self._teacher.teacher_of(each.columns) for each in self._prompts)
                waiting.saw_life()
            while not self._is_over():
                self._check_notice()
                if self._take_one():
                    continue
                # The trainer, too, waits as long as tokens or scores come.
                progress = self._ended.progress + self._journal.progress
                if progress != seen:
                    seen = progress
                    waiting.saw_life()
                if waiting.is_over:
                    log.warning("no token and no score has come for %.0f s; this scorer leaves", limit_s)
                    break
                waiting.pause(self._config.rollout.poll_interval_s)
        finally:
            self.beat(gone=True)
            if isinstance(self._teachers, VllmTeachers):
                self._teachers.close()
        return self.num_scored

    def in_words(self) -> str:
        """How far the scorer is."""
        return f"{self.num_scored:,} responses scored; {len(self._open):,} groups are open"

    def beat(self, *, gone: bool = False) -> None:
        """Write the heartbeat, which says "gone" ever after the first `gone`; any thread may call it."""
        with self._lock:
            self._held.is_gone |= gone
            self._held.beats += 1
            beat = HeartbeatRecord(
                incarnation=self.incarnation,
                slot=self._scorer,
                state="gone" if self._held.is_gone else "working",
                beat=self._held.beats,
                pool=self._teacher.pool or "",
                host=socket.gethostname(),
                pid=os.getpid(),
                started_at_s=started_at_s(),
                updated_at_s=self._clock.wall(),
                tokens_generated=0,
                tokens_recovered=0,
                prefill_tokens=0,
                responses_finished=self.num_scored,
                engine=self._teacher.engine,
                batch_invariant=False,
                claims=self._held.claims,
                unfinished=self._held.unfinished,
            )
            records.put(self._journal.store, layout.alive(self._plan.iteration, self.incarnation), beat)

    def _is_over(self) -> bool:
        """Whether no score is missing that training could read."""
        if is_trained(self._run, self._plan.iteration):
            return True
        if not self._closed and exists(self._run, layout.closed(self._plan.iteration)):
            self._closed = True
            keys = self._run.list(layout.batches(self._plan.iteration))
            read = (records.read(self._run, BatchRecord, key) for key in keys)
            self._open &= {each.response // self._plan.num_generations for batch in read for each in batch.responses}
        return not self._open

    def _check_notice(self) -> None:
        if self._notice():
            raise Preempted

    def _take_one(self) -> bool:
        """Claim and score the first free group that has ended; False if there is none."""
        self._ended.look()
        book = self._journal.reader.book
        book.refresh()
        if self._predecessors is None:
            slots = book.incarnations.items()
            self._predecessors = frozenset(name for name, slot in slots if slot == self._scorer)
        signs = self._liveness.look(list(book.incarnations))
        for group in sorted(self._open):
            responses = self._ended.responses(group)
            if responses is None or not self._is_free(group, responses, signs):
                continue
            if self._journal.claim(group, self.incarnation, self._scorer):
                self._score(group, responses)
                return True
        return False

    def _is_free(self, group: int, responses: Sequence[GradedResponse], signs: dict[str, MemberSign]) -> bool:
        """Whether the group may be claimed; a group whose scores are complete leaves the open ones."""
        book = self._journal.reader.book
        if not responses:
            self._open.discard(group)
            return False
        owner = book.owner(responses[0].response)
        if owner is None:
            return True
        if owner.incarnation == self.incarnation:
            self._open.discard(group)
            return False
        sign, has_ended = signs.get(owner.incarnation), owner.incarnation in (self._predecessors or ())
        if not has_ended and sign is not None and not sign.lost(self._config.rollout.claim_ttl_s):
            beat = sign.record
            if beat is not None and not beat.unfinished and beat.claims == book.claims_by(owner.incarnation):
                self._open.discard(group)
            return False
        self._journal.look_at([each.response for each in responses])
        if all(self._journal.is_complete(each.response) for each in responses):
            self._open.discard(group)
            return False
        return True

    def _score(self, group: int, responses: Sequence[GradedResponse]) -> None:
        """Score the tokens of a claimed group that have no scores yet, and write the scores.

        A scorer that was taken for dead leaves the group at the next pass: its later scores are void.
        """
        with self._lock:
            self._held.claims, self._held.unfinished = self._held.claims + 1, len(responses)
        self.beat()
        missing = {each.response: self._journal.num_scored(each.response) for each in responses}
        teacher = self._teachers.named(self._teacher.teacher_of(self._prompts[group].columns))
        passes = ForwardPasses(
            self._ended,
            self._plan,
            self._prompts,
            self._config.trainer.micro_batch_tokens_max,
            self._ranks,
            packed=isinstance(teacher, Teacher) and is_packed(teacher.module),
        )
        lengths = {each.response: each.policy_length for each in responses}
        for batch in passes(responses):
            self._check_notice()
            if not self._journal.is_held_by(group, self.incarnation):
                break
            if any(missing[number] < lengths[number] for number in batch.responses):
                top_k = max(1, self._teacher.head_size(self._vocabulary))
                scores = teacher.scores(batch, self._plan.sampling.temperature, top_k, self._vocabulary)
                of_pass = by_response(scores, batch)
                self._write(group, [each for each in responses if each.response in of_pass], of_pass, missing)
        if self._journal.is_held_by(group, self.incarnation):
            self.num_scored += len(responses)
        with self._lock:
            self._held.unfinished = 0
        self.beat()

    def _write(
        self,
        group: int,
        responses: Sequence[GradedResponse],
        scores: dict[int, TokenScores],
        scored: dict[int, int],
    ) -> None:
        """Write the scores of a pass in shards. scored: how many tokens of each response have scores already."""
        epoch = self._journal.reader.book.epoch(group)
        pending, room = PendingRows(), self._shard_tokens
        for graded in responses:
            sampled = policy_tokens(self._ended.tokens(graded))
            start = scored[graded.response]
            while start < len(sampled):
                tokens = range(start, min(start + room, len(sampled)))
                append_scores(pending, graded.response, epoch, sampled, scores[graded.response], tokens)
                start, room = tokens.stop, room - len(tokens)
                if not room:
                    self._writer.write(pending)
                    pending, room = PendingRows(), self._shard_tokens
        self._writer.write(pending)
