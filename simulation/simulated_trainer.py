"""The trainer of a simulated crew, without gradients, and an observer, which only reads, at any time.

Both read with the production code and compare each result at once with the undisturbed responses. The production code
follows, grades, filters, divides, records and closes. In histories with absences, the trainer generates whenever the
production code raises LeftAlone, and then replays.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace

from simulation.ledger import Ledger
from simulation.simulated_history import TRAINING_S_MAX, History, reward_of
from simulation.simulated_member import EXECUTION, new_watch
from simulation.simulated_path import LEASE_BEAT_S
from simulation.simulated_step import is_done, lacks_state, publish_and_save, restored, save, trained
from simulation.undisturbed import Whole, begins, prompt
from simulation.virtual_time import Process
from storage.journal.assembly import Assembled, JournalReader
from storage.records import layout
from storage.records.prompt_table import PromptRow
from storage.records.records import BatchRecord, GradedResponse
from storage.records.run import beat_lease, exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore, StorageError
from tasks.configuration.rewards import RewardConfig
from tasks.grading.grader import Grader
from tasks.learning.journal_follower import FollowConfig, GroupFollower
from tasks.learning.recorded_batches import RecordedBatches
from tasks.prompts.prompt import Message
from tasks.sampling.session.crew_watch import LeftAlone
from tasks.sampling.session.session_outcome import SessionOutcome

FOR_EVER_S = 1e9
STALLS, STALL_S = 0.5, (20.0, 400.0)
Watch = Callable[[bool], None]
# The only reward that runs in this process: 1.0 if the decoded text equals a column of the prompt.
REWARD = RewardConfig(function="arithmetic")
WORTH = {"worked": str(1.0)}


class SimulatedTrainer:
    """One life of the trainer: uses recorded batches, then records new batches ahead of use, and at last closes."""

    def __init__(
        self,
        history: History,
        store: ObjectStore,
        process: Process,
        ledger: Ledger,
        truth: Mapping[int, Whole],
        *,
        generate: Callable[[], SessionOutcome],
    ) -> None:
        self._history = history
        self._plan = history.plan
        self._store = store
        self._process = process
        self._ledger = ledger
        self._truth = truth
        self._rng = random.Random(f"trainer {history.seed} {process.name}")
        self._generate = generate
        self._is_fruitless = False

    def advance(self) -> None:
        """Train an iteration and publish the next weight version, as `advance` in tasks/learning/train_iteration.py."""
        store, plan, clock = self._store, self._plan, self._process.clock
        began_at_s, began_s = clock.wall(), clock.monotonic()
        is_published = is_done(store, plan)
        if is_published and not lacks_state(store, plan):
            return
        try:
            base = restored(store, plan.iteration, clock)
            if is_published:
                save(store, plan.iteration + 1, trained(self._history, base, self.train(), self._process.name))
                return
            used = self.train()
            publish_and_save(
                store,
                self._history,
                base,
                used,
                clock,
                life=self._process.name,
                stalls_s=self._stalls_s(),
                began_at_s=began_at_s,
                took_s=clock.monotonic() - began_s,
            )
        except StorageError:
            if not exists(store, layout.report(plan.iteration)):
                raise
            self._ledger.tell(self._process.name, "the iteration was concluded by another")

    def _stalls_s(self) -> float:
        """Seconds that this life stands still between publishing and saving, while a frozen life may wake up.

        It matters only if the last bits differ between lives.
        """
        rng = random.Random(f"stall {self._history.seed} {self._process.name}")
        return rng.uniform(*STALL_S) if self._history.inexact and rng.random() < STALLS else 0.0

    def train(self) -> list[BatchRecord]:
        """Train until all groups, or as many as the plan wants, are recorded; returns the batches in order."""
        while True:
            try:
                return self._train(self._watch())
            except LeftAlone as error:
                self._ledger.tell(self._process.name, str(error))
            self._is_fruitless = not self._generate().tokens_generated

    def _watch(self) -> Watch:
        if self._history.absence is None:
            return lambda _: None
        return new_watch(self._history, self._store, self._process.clock, at_once=not self._is_fruitless).check

    def _train(self, watch: Watch) -> list[BatchRecord]:
        used = []
        with Grader((REWARD,)) as grader:
            batches = Batches(self._history, self._store, self._process, grader, watch)
            for batch in batches:
                self._note_used(batch.number, batch.responses)
                for graded in batch.graded:
                    self._compare(graded, batches.tokens(graded))
                self._process.sleep(self._rng.uniform(0, TRAINING_S_MAX))
                used.append(batch)
        return used

    def _note_used(self, number: int, responses: Sequence[GradedResponse]) -> None:
        used = tuple(graded.response for graded in responses)
        self._ledger.used.append((self._process.name, number, used))

    def _compare(self, recorded: GradedResponse, response: Assembled) -> None:
        whole = response.finish.ends_response and len(response.token_ids) == recorded.length
        if not whole or not begins(response, self._truth[recorded.response]):
            self._ledger.breaks(f"changed: {self._process.name} used wrong tokens of response {recorded.response}")


class Batches(RecordedBatches):
    """The production code, with one read request at a time, because virtual time has no thread pools."""

    def __init__(self, history: History, store: ObjectStore, process: Process, grader: Grader, watch: Watch) -> None:
        plan, follow = history.plan, _follow(history)
        super().__init__(
            store,
            plan,
            prompts=[replace(prompt(group), columns=WORTH) for group in range(plan.num_groups)],
            grader=grader,
            decode=lambda token_ids: str(reward_of(token_ids)),
            read_messages=None if history.script is None else _read_messages,
            follow=follow,
            tokens_max=history.micro_batch_tokens_max,
            clock=process.clock,
        )
        self._reader = JournalReader(store, plan, 1)
        self._follower = GroupFollower(self._reader, plan, follow, process.clock, watch)


def _read_messages(
    row: PromptRow, token_ids: Sequence[int], _origins: Sequence[int], _events: Sequence[bytes]
) -> tuple[Sequence[Message], list[Message]]:
    """A conversation as the reward function sees it: a single message with the reward of all tokens as text."""
    asked = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
    return asked, [{"role": "assistant", "content": str(reward_of(token_ids))}]


def _follow(history: History) -> FollowConfig:
    return FollowConfig(
        in_plan_order=history.in_plan_order,
        timeout_s=FOR_EVER_S,
        poll_interval_s=history.poll_interval_s,
        flush_interval_s=history.flush_interval_s,
    )


def keep_lease(store: ObjectStore, process: Process) -> None:
    """Refresh the run's lease until the process ends, as `keep_lease` in tasks/learning/train_iteration.py."""
    while True:
        process.clock.sleep(LEASE_BEAT_S)
        with suppress(StorageError):
            beat_lease(store, EXECUTION, process.clock)


def observe(history: History, store: ObjectStore, process: Process, ledger: Ledger, truth: Mapping[int, Whole]) -> None:
    """Check now and then, until the iteration is closed, that readers get the first tokens of undisturbed responses."""
    rng = random.Random(f"observer {history.seed}")
    reader = JournalReader(store, history.plan, 1)
    while not ledger.is_closed:
        process.sleep(rng.uniform(10, 60))
        try:
            reader.refresh()
            for response, whole in truth.items():
                if not begins(reader.assemble(response), whole):
                    ledger.breaks(f"changed: a reader got wrong tokens of response {response}")
        except (CorruptObject, ObjectMissing) as error:
            # Retention may be deleting what it reads.
            if not ledger.deleted:
                ledger.breaks(f"changed: a reader met {error}")
            return
