"""Route: the next iteration on which a standing member works, or one that joined (docs/decisions/0018).

A member enters each iteration once, in ascending order, as soon as it has no work and the plan is there. While no
further iteration is planned, it waits in the oldest open iteration, because every later iteration waits for the
responses that are free there. After the last iteration it visits the open iterations, and leaves each for good.
"""

from contextlib import suppress

from storage.records import layout
from storage.records.records import PlanRecord
from storage.records.run import execution_of, exists, lease_holder, published_version, read_plan
from storage.stores.store import ObjectMissing, ObjectStore


class Route:
    """The iterations `first` to `last` of an execution, for one member. Only reads the run."""

    def __init__(self, store: ObjectStore, execution: str | None, first: int, last: float) -> None:
        """execution: None takes the iterations of every execution. last: math.inf without an end."""
        self._store = store
        self._execution = execution
        self._last = last
        self._oldest = first
        self._entered = first - 1
        self._left: set[int] = set()

    def next(self) -> PlanRecord | None:
        """The plan of the iteration to work on now; None while none is open, or after the last one."""
        self._pass_over_closed()
        while self._entered < self._last and exists(self._store, layout.closed(self._entered + 1)):
            self._entered += 1
        if self._entered < self._last and (plan := self._planned(self._entered + 1)) is not None:
            return plan
        return self._planned(self._oldest) if self._oldest <= self._entered else None

    def enter(self, iteration: int) -> None:
        """Note that the member works on an iteration."""
        self._entered = max(self._entered, iteration)

    def leave(self, iteration: int) -> None:
        """Note that the member has left an iteration for good."""
        self._left.add(iteration)

    def leads_away(self, iteration: int) -> bool:
        """Whether a member without work in an iteration should go on to the next one, or leave for good."""
        following = self.next()
        return (following is not None and following.iteration != iteration) or self.leaves(iteration)

    def leaves(self, iteration: int) -> bool:
        """Whether the member leaves an iteration for good: no iteration follows, and no earlier iteration is open."""
        return self._entered >= self._last and iteration <= self._oldest

    @property
    def is_over(self) -> bool:
        """Whether each iteration is closed or left for good, as far as `next` has seen."""
        return self._oldest > self._last

    def is_given_up(self) -> bool:
        """Whether the execution no longer holds the lease of the run, because of its end or of another execution."""
        return lease_holder(self._store) != self._execution

    def newer_weights(self, held: int | None) -> int | None:
        """The newest weight version that is published and newer than `held`; None if there is none.

        The next plan names the newest version, or an older version if iterations overlap.
        """
        return published_version(self._store, self._entered + 1, 0 if held is None else held + 1)

    def first_weights(self) -> int | None:
        """The weight version for a member that begins now; None if there is neither a plan nor a version."""
        plan = self.next()
        return self.newer_weights(None) if plan is None else plan.weight_version

    def _pass_over_closed(self) -> None:
        while self._oldest <= self._last and self._is_done(self._oldest):
            self._oldest += 1
        self._entered = max(self._entered, self._oldest - 1)

    def _is_done(self, iteration: int) -> bool:
        return iteration in self._left or exists(self._store, layout.closed(iteration))

    def _planned(self, iteration: int) -> PlanRecord | None:
        """The plan, if this execution works on it: another one has members of its own."""
        with suppress(ObjectMissing):
            plan = read_plan(self._store, iteration)
            if self._execution is None or execution_of(self._store, iteration) == self._execution:
                return plan
        return None
