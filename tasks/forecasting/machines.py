"""The machines of a pool: machines come and go by the trace, start, and are paid for from the moment of being taken.

A machine books its time by purpose, and knows nothing of the work of its member.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence

from tasks.crew_model.accounts import Account
from tasks.crew_model.crew_member import ModelMember
from tasks.crew_model.events import Events
from tasks.forecasting.availability import Change
from tasks.forecasting.scenario import PoolScenario


class Machine:
    """A machine that is paid for.

    Attributes:
        place: number of the machine's place in the market.
        account: account of the machine's time.
        part: purpose of the time without a working member (tasks.crew_model.accounts.PARTS).
        began_s: second at which the machine was taken.
        since_s: second up to which the time is booked.
        ready: True after the start of the machine.
        present: False after the machine was lost or released.
        slot: slot of the machine; None: no slot.
        member: newest member on the machine; None before the first.
        weight_version: weight version on the machine; None before the first.
        pull: number of the pull in progress (Links.pull); None: no pull.
        pulling: weight version of `pull`.
        entered: last iteration that the machine's process has entered; -1 before the first.
    """

    def __init__(self, place: int, now_s: float, account: Account) -> None:
        self.place = place
        self.account = account
        self.part = "starting"
        self.began_s = now_s
        self.since_s = now_s
        self.ready = False
        self.present = True
        self.slot: int | None = None
        self.member: ModelMember | None = None
        self.weight_version: int | None = None
        self.pull: int | None = None
        self.pulling: int | None = None
        self.entered = -1

    def settle(self, now_s: float, part: str | None = None, account: Account | None = None) -> None:
        """Book the time until now; a given `part` and a given `account` hold for later time.

        A working member books its own time.
        """
        if self.member is None or self.member.state != "working":
            self.account.add(self.part, now_s - self.since_s)
        else:
            self.member.advance(now_s)
        self.since_s = now_s
        self.part = part or self.part
        self.account = account or self.account


class Stock:
    """All machines of a pool.

    Args:
        events: the events of the simulation.
        pool: the pool.
        changes: arrivals and losses of the pool's places, in order (tasks.forecasting.availability.changes).
        on_ready: called when the machine of a slot has started.
        on_lost: called when a machine was lost.
    """

    def __init__(
        self,
        events: Events,
        pool: PoolScenario,
        changes: Iterator[Change],
        *,
        on_ready: Callable[["Stock", Machine, int], None],
        on_lost: Callable[["Stock", Machine], None],
    ) -> None:
        self.pool = pool
        self.account = Account(pool.name, pool.usd_per_h, pool.gpus, pool.egress_usd_per_gb)
        self.machines: dict[int, Machine] = {}
        self._events = events
        self._changes = changes
        self._on_ready, self._on_lost = on_ready, on_lost
        self._present: dict[int, None] = {}
        self._pending: deque[int] = deque()
        self._available: int | None = None
        self._released_s = 0.0
        self._next_change()

    @property
    def available(self) -> int | None:
        """Machines at the last `withdraw` while slots waited for more; None: no slot waited."""
        return self._available

    @property
    def ready(self) -> int:
        """The number of machines that are paid for and have started."""
        return sum(machine.ready for machine in self.machines.values())

    @property
    def paid_s(self) -> float:
        """Machine seconds paid so far, from taking a machine until its loss or release."""
        now_s = self._events.now_s
        return self._released_s + sum(now_s - machine.began_s for machine in self.machines.values())

    def settle(self, account: Account | None = None) -> None:
        """Book all time until now; a given `account` gets later time."""
        self.account = account or self.account
        for machine in self.machines.values():
            machine.settle(self._events.now_s, account=account)

    def assign(self, slots: Sequence[int]) -> None:
        """Give every slot a machine: machines already paid for first, new machines next, later arrivals at the end.

        Superfluous machines are released.
        """
        kept = sorted(self.machines.values(), key=lambda machine: (not machine.ready, machine.place))
        for machine in kept[len(slots) :]:
            self.release(machine)
        for machine, slot in zip(kept, slots, strict=False):
            machine.slot, machine.member = slot, None
            if machine.ready:
                self._on_ready(self, machine, slot)
        self._pending = deque(slots[len(kept) :])
        self._fill()

    def want(self, slot: int) -> None:
        """Queue a slot for a new machine after the loss of its machine."""
        self._pending.append(slot)
        self._fill()

    def withdraw(self) -> None:
        """End the waiting of all slots for machines."""
        self._available = len(self.machines) if self._pending else None
        self._pending.clear()

    def release(self, machine: Machine) -> None:
        """Stop paying for the machine."""
        machine.settle(self._events.now_s)
        self._released_s += self._events.now_s - machine.began_s
        machine.present = False
        del self.machines[machine.place]

    def _fill(self) -> None:
        """Give waiting slots the machines without a slot, then new machines."""
        for machine in list(self.machines.values()):
            if self._pending and machine.slot is None and machine.ready:
                machine.slot = self._pending.popleft()
                self._on_ready(self, machine, machine.slot)
        free = [place for place in self._present if place not in self.machines] if self._pending else []
        for place in free[: len(self._pending)]:
            machine = Machine(place, self._events.now_s, self.account)
            machine.slot = self._pending.popleft()
            self.machines[place] = machine
            self._events.after(self.pool.start_s, lambda machine=machine: self._started(machine))  # type: ignore[misc]

    def _started(self, machine: Machine) -> None:
        if machine.present:
            machine.ready = True
            machine.settle(self._events.now_s, "standing")
            if machine.slot is not None:
                self._on_ready(self, machine, machine.slot)

    def _next_change(self) -> None:
        change = next(self._changes, None)
        if change is not None:
            at_s, place, present = change
            self._events.at(at_s, lambda: self._change(place, present=present))

    def _change(self, place: int, *, present: bool) -> None:
        if present:
            self._present[place] = None
            self._fill()
        else:
            del self._present[place]
            machine = self.machines.get(place)
            if machine is not None:
                machine.account.losses += 1
                self.release(machine)
                self._on_lost(self, machine)
        self._next_change()
