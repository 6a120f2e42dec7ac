"""Score session: one incarnation of a scorer, which claims groups as they end and journals the teacher's scores.

A scorer takes free groups in the order of the plan: groups without a claim, and groups of a scorer that no longer
lives. Each pass of the teacher is over a group's responses, as in the trainer's process, and its scores are written in
shards. The successor of a killed scorer makes the unfinished pass again, and writes from the first token without a
score on.

A claim on a response may void the end that a scorer has read. Scores of other tokens than those that a micro-batch
records afterwards do not count, so the holder of the group scores such a response again.
"""

import logging
import os
import socket
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from typing import Literal

from resources.process import started_at_s
from resources.work_log import at_work
from storage.clock import Clock
from storage.journal.journal import JournalWriter, PendingRows
from storage.journal.liveness import Liveness, MemberSign
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.records.run import exists, is_trained, read_run
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.waiting import Wait
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.learning.distillation import TokenScores
from tasks.learning.ended_groups import EndedGroup, EndedGroups
from tasks.learning.forward_passes import ForwardPasses
from tasks.learning.packing import is_packed
from tasks.learning.ranks import Ranks
from tasks.learning.score_journal import ScoreJournal, ScorePlace, append_scores, policy_tokens
from tasks.learning.teacher_scoring import by_response
from tasks.learning.teachers import Teacher, Teachers
from tasks.learning.vllm_teachers import VllmTeachers
from tasks.sampling.session.session_outcome import Preempted

log = logging.getLogger(__name__)
# "waits": until a micro-batch says which tokens count. The holder of a group that is "left to another" lives.
State = Literal["due", "in work", "waits", "left to another", "scored"]
# With a head of 64 tokens, a shard has 2 MB.
SHARD_TOKENS = 4096


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
        self._ended = EndedGroups(store, plan, config.rollout)
        self._journal = ScoreJournal(store, plan, teacher.head_size(self._vocabulary))
        self._liveness = Liveness(self._journal.store, plan.iteration, clock)
        self._writer = JournalWriter(self._journal.store, plan.iteration, self.incarnation, 0)
        self._teachers = (
            VllmTeachers(store, config, teacher, self._vocabulary)
            if teacher.engine == "vllm"
            else Teachers(store, config.trainer, ranks)
        )
        # Groups that may lack scores; of them, those whose scores are there, or left to a scorer that lives.
        self._open, self._settled, self._closed = set(range(plan.num_groups)), set[int](), False
        # The identities of responses whose scores are known to be complete, by group.
        self._scored: dict[int, dict[int, bytes]] = {}
        self._held = _Held()
        self._lock: AbstractContextManager[object] = threading.Lock()
        # Earlier processes of this scorer, which have ended. One that claims later may live, as a successor does.
        self._predecessors: frozenset[str] | None = None

    def run(self) -> int:
        """Score until nothing is left to score; returns the number of responses completed.

        Raises Preempted after a notice, NonFiniteGradient for log-probs that are not finite, CorruptObject, and the
        errors of `Teachers.named` or, with vLLM, of `VllmTeachers.named`.
        """
        if self._is_over():
            return 0
        at_work(f"scoring iteration {self._plan.iteration} as {self.incarnation}", self.in_words)
        self.beat()
        with ExitStack() as stack:
            if isinstance(self._teachers, VllmTeachers):
                stack.callback(self._teachers.close)
            # First: others wait for the groups of a scorer that lives.
            stack.callback(self.beat, gone=True)
            try:
                if isinstance(self._teachers, VllmTeachers):
                    # While responses are being generated, because vLLM takes minutes to start.
                    self._teachers.start(self._teacher.teacher_of(each.columns) for each in self._prompts)
                self._score_all()
            except (ObjectMissing, CorruptObject):
                # A sweep may have begun to delete what is read.
                if not is_trained(self._run, self._plan.iteration):
                    raise
        return self.num_scored

    def _score_all(self) -> None:
        limit_s = self._config.trainer.group_timeout_s
        waiting = Wait("groups to end", self._clock, limit_s, "then this scorer leaves (trainer.group_timeout_s)")
        seen = 0
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
                return
            waiting.pause(self._config.rollout.poll_interval_s)

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
        self._closed = self._closed or exists(self._run, layout.closed(self._plan.iteration))
        return self._open <= self._settled

    def _check_notice(self) -> None:
        if self._notice():
            raise Preempted

    def _take_one(self) -> bool:
        """Score the first group that lacks scores and is this scorer's to score; False if there is none."""
        self._ended.look(self._clock.monotonic())
        if self._closed:
            # Every micro-batch was recorded by then.
            self._open &= self._ended.recorded
        book = self._journal.reader.book
        book.refresh()
        if self._predecessors is None:
            slots = book.incarnations.items()
            self._predecessors = frozenset(name for name, slot in slots if slot == self._scorer)
        signs = self._liveness.look(list(book.incarnations))
        self._settled = set()
        for group in sorted(self._open):
            ended = self._ended.named(group)
            state = None if ended is None else self._state(group, ended, signs)
            if ended is None or state in ("in work", "waits"):
                continue
            if state == "due":
                if self._take(group, ended):
                    return True
                continue
            self._settled.add(group)
            if state == "scored" and ended.is_recorded:
                self._open.discard(group)
        return False

    def _state(self, group: int, ended: EndedGroup, signs: Mapping[str, MemberSign]) -> State:
        if ended.identities.items() <= self._scored.get(group, {}).items():
            return "scored"
        book = self._journal.reader.book
        owner = book.owner(min(ended.identities))
        if owner is None:
            return "due"
        sign, has_ended = signs.get(owner.incarnation), owner.incarnation in (self._predecessors or ())
        is_own = owner.incarnation == self.incarnation
        if not is_own and not has_ended and sign is not None and not sign.lost(self._config.rollout.claim_ttl_s):
            beat = sign.record
            is_done = beat is not None and not beat.unfinished and beat.claims == book.claims_by(owner.incarnation)
            return "left to another" if is_done else "in work"
        self._journal.look_at(group)
        places = self._places(ended)
        if places is None:
            return "waits"
        if not all(place.is_complete for place in places.values()):
            return "due"
        self._scored[group] = ended.identities
        return "scored"

    def _places(self, ended: EndedGroup) -> dict[int, ScorePlace] | None:
        """Where the scores of each response stand; None while those of other tokens are in the way."""
        places = {
            number: self._journal.place(number, named, is_recorded=ended.is_recorded)
            for number, named in ended.identities.items()
        }
        found = {number: place for number, place in places.items() if place is not None}
        return found if len(found) == len(places) else None

    def _take(self, group: int, ended: EndedGroup) -> bool:
        """Claim a group, unless it is this scorer's own, and score it; False if another claim came first."""
        # A beat between claim and count must not look like one of a scorer that has scored all that it claimed.
        self._held.unfinished = len(ended.responses)
        owner = self._journal.reader.book.owner(min(ended.identities))
        if owner is None or owner.incarnation != self.incarnation:
            if not self._journal.claim(group, self.incarnation, self._scorer):
                self._held.unfinished = 0
                return False
            self._held.claims += 1
        self.beat()
        places = self._places(ended)
        if places is not None and self._score(group, ended, places):
            self._scored[group] = ended.identities
            self.num_scored += len(ended.responses)
        self._held.unfinished = 0
        self.beat()
        return True

    def _score(self, group: int, ended: EndedGroup, places: Mapping[int, ScorePlace]) -> bool:
        """Score the tokens of a group that have no scores yet, and write the scores; whether the group is still held.

        A scorer that was taken for dead leaves the group at the next pass: its later scores are void.
        """
        teacher = self._teachers.named(self._teacher.teacher_of(self._prompts[group].columns))
        passes = ForwardPasses(
            self._ended,
            self._plan,
            self._prompts,
            self._config.trainer.micro_batch_tokens_max,
            self._ranks,
            packed=isinstance(teacher, Teacher) and is_packed(teacher.module),
        )
        for batch in passes(ended.responses):
            self._check_notice()
            if not self._journal.is_held_by(group, self.incarnation):
                return False
            missing = [number for number in batch.responses if not places[number].is_complete]
            if missing:
                top_k = max(1, self._teacher.head_size(self._vocabulary))
                scores = teacher.scores(batch, self._plan.sampling.temperature, top_k, self._vocabulary)
                of_pass = by_response(scores, batch)
                self._write(group, ended, {number: of_pass[number] for number in sorted(missing)}, places)
        return self._journal.is_held_by(group, self.incarnation)

    def _write(
        self, group: int, ended: EndedGroup, scores: Mapping[int, TokenScores], places: Mapping[int, ScorePlace]
    ) -> None:
        """Write the scores of a pass in shards."""
        epoch = self._journal.reader.book.epoch(group)
        pending, room = PendingRows(), self._shard_tokens
        for graded in ended.responses:
            if graded.response not in scores:
                continue
            place, named = places[graded.response], ended.identities[graded.response]
            sampled = policy_tokens(self._ended.tokens(graded))
            start = place.num_scored
            while start < len(sampled):
                tokens = range(start, min(start + room, len(sampled)))
                append_scores(pending, place.number, epoch, sampled, scores[graded.response], tokens, named)
                start, room = tokens.stop, room - len(tokens)
                if not room:
                    self._writer.write(pending)
                    pending, room = PendingRows(), self._shard_tokens
        self._writer.write(pending)
