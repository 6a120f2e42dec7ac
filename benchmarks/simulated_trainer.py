"""The trainer of a simulated crew, without its gradients; and an observer, who reads at any moment and wants nothing.

Both read with the production code and compare what they get with the undisturbed responses on the spot.
"""

import random
from collections.abc import Callable, Mapping
from contextlib import suppress

from benchmarks.ledger import Ledger
from benchmarks.simulated_history import History
from benchmarks.undisturbed import Whole, begins
from benchmarks.virtual_time import Process
from storage import layout, records
from storage.assembly import Assembled, JournalReader
from storage.records import BatchRecord, ClosedRecord, GradedResponse
from storage.run import exists
from storage.shard import Finish
from storage.store import CorruptObject, ObjectMissing, ObjectStore, commit
from tasks.learning.follow import FollowConfig, GroupFollower, RecordedElsewhereError

FOR_EVER_S = 1e9


class SimulatedTrainer:
    """One life of the trainer: recorded batches first, then new ones, each recorded before use; at last, `closed`."""

    def __init__(
        self, history: History, store: ObjectStore, process: Process, ledger: Ledger, truth: Mapping[int, Whole]
    ) -> None:
        self._plan = history.plan
        self._in_plan_order = history.in_plan_order
        self._store = store
        self._process = process
        self._ledger = ledger
        self._truth = truth
        self._rng = random.Random(f"trainer {history.seed} {process.name}")
        self._reader = JournalReader(store, history.plan, 1)
        config = FollowConfig(
            in_plan_order=history.in_plan_order, timeout_s=FOR_EVER_S, poll_interval_s=history.poll_interval_s
        )
        self._follower = GroupFollower(self._reader, history.plan, config, process.clock)

    def train(self) -> None:
        pending, number = list(range(self._plan.num_groups)), 0
        while pending:
            batch = self._batch(number, pending)
            for graded in batch.responses:
                self._use(graded)
            groups = {graded.response // self._plan.num_generations for graded in batch.responses}
            pending = [group for group in pending if group not in groups]
            number += 1
            self._process.sleep(self._rng.uniform(0, 5))
        mark = ClosedRecord(iteration=self._plan.iteration, reason="all responses are recorded")
        commit(self._store, layout.closed(self._plan.iteration), records.encode(mark))

    def _batch(self, number: int, pending: list[int]) -> BatchRecord:
        key = layout.batch(self._plan.iteration, number)
        with suppress(ObjectMissing):
            return records.read(self._store, BatchRecord, key)
        with suppress(RecordedElsewhereError):
            batch = self._new_batch(number, pending, lambda: exists(self._store, key))
            if commit(self._store, key, records.encode(batch)):
                return batch
        return records.read(self._store, BatchRecord, key)

    def _new_batch(self, number: int, pending: list[int], recorded: Callable[[], bool]) -> BatchRecord:
        groups = [self._follower.wait(pending, recorded)]
        if not self._in_plan_order:
            groups += [group for group in pending if group not in groups and self._follower.is_finished(group)]
        found = [self._follower.response(response) for group in groups for response in self._follower.members(group)]
        return BatchRecord(
            iteration=self._plan.iteration, number=number, responses=tuple(_graded(response) for response in found)
        )

    def _use(self, recorded: GradedResponse) -> None:
        response = self._reader.follow(recorded.response, recorded.lineage)
        whole = response.finish.ends_response and len(response.token_ids) == recorded.length
        if not whole or not begins(response, self._truth[recorded.response]):
            self._ledger.breaks(f"changed: {self._process.name} used wrong tokens of response {recorded.response}")


def observe(history: History, store: ObjectStore, process: Process, ledger: Ledger, truth: Mapping[int, Whole]) -> None:
    """Until the iteration is closed, now and then: any reader gets the first tokens of the undisturbed response."""
    rng = random.Random(f"observer {history.seed}")
    reader = JournalReader(store, history.plan, 1)
    while not ledger.is_closed:
        process.sleep(rng.uniform(10, 60))
        try:
            reader.refresh()
            for response, whole in truth.items():
                if not begins(reader.assemble(response), whole):
                    ledger.breaks(f"changed: a reader got wrong tokens of response {response}")
        except CorruptObject as error:
            ledger.breaks(f"changed: a reader met {error}")
            return


def _graded(response: Assembled) -> GradedResponse:
    """As the trainer records it; rewards are no matter here."""
    return GradedResponse(
        response=response.response,
        length=len(response.token_ids),
        finish_reason="stop" if response.finish is Finish.STOP else "length",
        lineage=response.lineage,
        reward=0.0,
        rewards={},
    )
