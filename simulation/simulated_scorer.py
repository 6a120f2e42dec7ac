"""A scorer in virtual time: production's session with a teacher whose scores follow from the tokens that it reads."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from types import SimpleNamespace, TracebackType
from typing import cast

import numpy as np
import torch

from simulation.simulated_history import VOCABULARY
from simulation.simulated_session import Machine
from simulation.undisturbed import prompt
from storage.journal.journal import JournalWriter
from storage.journal.noise_keys import mix64
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore, StorageError
from tasks.configuration.run_config import RunConfig
from tasks.learning.batching import TokenBatch
from tasks.learning.distillation import TokenScores
from tasks.learning.learner import Learner
from tasks.learning.ranks import Ranks
from tasks.learning.score_session import ScoreSession
from tasks.learning.teachers import Teacher, Teachers

Row = tuple[float, bool, list[int], list[float]]
LOCK_S = 0.01


def row_of(context: Sequence[int], top_k: int) -> Row:
    """The score of the last token of a context: log-prob, agreement, and the head; another one for other tokens."""
    word = 0
    for token in context:
        word = mix64(word ^ (token + 1))
    first = context[-1] if word % 2 else (context[-1] + 1) % VOCABULARY
    head = [first, *((first + 2 + place) % VOCABULARY for place in range(1, top_k))]
    logprobs = [-float(word % 1000 + place) / 64 for place in range(top_k)]
    return -float(word % 977) / 64, first == context[-1], head, logprobs


class ScriptedTeacher:
    """What a session needs of a teacher. pass_s: how long a pass takes."""

    def __init__(self, pass_s: Callable[[], None]) -> None:
        self._pass_s = pass_s
        self.module = SimpleNamespace(config=SimpleNamespace(_attn_implementation="eager"))

    def scores(self, batch: TokenBatch, _temperature: float, top_k: int, _vocabulary: int) -> TokenScores:
        """The scores of the sampled tokens of a pass, in the order of its mask."""
        self._pass_s()
        rows: list[Row] = []
        for index, (length, total) in enumerate(zip(batch.prompt_lengths, batch.total_lengths, strict=True)):
            tokens = batch.input_ids[index, :total].tolist()
            sampled = batch.response_mask[index].nonzero()[:, 0].tolist()
            rows += [row_of(tokens[: length + place + 1], top_k) for place in sampled]
        logprobs, agrees, ids, head = zip(*rows, strict=True)
        return TokenScores(torch.tensor(logprobs), torch.tensor(agrees), torch.tensor(ids), torch.tensor(head))


class ScriptedTeachers(Teachers):
    """One teacher for every name."""

    def __init__(self, pass_s: Callable[[], None]) -> None:
        self._teacher = ScriptedTeacher(pass_s)

    def named(self, _name: str) -> Teacher:
        return cast("Teacher", self._teacher)


class TurnLock:
    """A lock among the threads of a process in virtual time."""

    def __init__(self, process: Machine) -> None:
        self._process = process
        self._is_held = False

    def __enter__(self) -> None:
        while self._is_held:
            self._process.sleep(LOCK_S)
        self._is_held = True

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._is_held = False


class SimulatedScorer(ScoreSession):
    """One life of a scorer, whose process has the incarnation's name."""

    def __init__(
        self,
        process: Machine,
        store: ObjectStore,
        plan: PlanRecord,
        config: RunConfig,
        scorer: int,
        notice: Callable[[], bool],
        pass_s: Callable[[], None],
        shard_tokens: int,
    ) -> None:
        """pass_s: lets the time of a pass go by. shard_tokens: as for the session."""
        if config.teacher is None:
            raise ValueError("teacher: null; allowed: a teacher with a pool")
        super().__init__(
            store,
            plan,
            prompts=[prompt(group) for group in range(plan.num_groups)],
            config=config,
            teacher=config.teacher,
            ranks=Ranks(),
            scorer=scorer,
            clock=process.clock,
            notice=notice,
            shard_tokens=shard_tokens,
        )
        self.incarnation = process.name
        self._writer = JournalWriter(self._journal.store, plan.iteration, self.incarnation, 0)
        self._teachers = ScriptedTeachers(pass_s)
        self._lock = TurnLock(process)

    def live(self, process: Machine) -> int:
        """Score with a heartbeat beside, as in `score_iteration`; returns how many responses were completed."""

        def beat() -> None:
            while True:
                process.clock.sleep(self._config.rollout.heartbeat_interval_s)
                with suppress(StorageError):
                    self.beat()

        process.spawn(beat)
        return self.run()


def learner_without_model() -> Learner:
    """What the trainer's scoring needs of a learner: one rank, and the size of the vocabulary."""
    embeddings = SimpleNamespace(weight=np.zeros((VOCABULARY, 1)))
    policy = SimpleNamespace(module=SimpleNamespace(get_input_embeddings=lambda: embeddings))
    return cast("Learner", SimpleNamespace(ranks=Ranks(), policy=policy))
