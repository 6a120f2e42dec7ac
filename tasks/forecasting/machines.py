"""The machines of a pool: they come and go by the trace, start, and are paid for from the moment they are taken.

They do not know what a member does on them, only what their time is spent on.
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

    account: where its time is booked. part: what its time is spent on while no member works on it (ledger.PARTS).
    entered: the last iteration that its process has entered. pulling: the weight version of `pull`.
    """

    def __init__(self, place: int, now_s: float, account: Account) -> None:
        self.place = place
        self.account = account
        self.part = "starting"
        self.began_s = now_s
        self.since_s = now_s
        self.ready = False
        self.there = True
        self.slot: int | None = None
        self.member: ModelMember | None = None
        self.weight_version: int | None = None
        self.pull: int | None = None
        self.pulling: int | None = None
        self.entered = -1

    def settle(self, now_s: float, part: str | None = None, account: Account | None = None) -> None:
        """Book the time until now; later time is spent on `part`, and goes to `account`, if these are given.

        A member that works books its own time.
        """
        if self.member is None or self.member.state != "working":
            self.account.add(self.part, now_s - self.since_s)
        else:
            self.member.advance(now_s)
        self.since_s = now_s
        self.part = part or self.part
        self.account = account or self.account


class Stock:
    """All machines of a pool. on_ready: a slot's machine has started; on_lost: a machine was lost."""

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
        self._there: dict[int, None] = {}
        self._pending: deque[int] = deque()
        self._available: int | None = None
        self._released_s = 0.0
        self._next_change()

    @property
    def available(self) -> int | None:
        """How many machines there were when slots last waited for more; None: as many as were wanted."""
        return self._available

    @property
    def ready(self) -> int:
        """How many machines are paid for and have started."""
        return sum(machine.ready for machine in self.machines.values())

    @property
    def paid_s(self) -> float:
        """Machine seconds that were paid for so far, from when a machine was taken until it went."""
        now_s = self._events.now_s
        return self._released_s + sum(now_s - machine.began_s for machine in self.machines.values())

    def settle(self, account: Account | None = None) -> None:
        """Book all time until now; later time goes to `account`, if one is given."""
        self.account = account or self.account
        for machine in self.machines.values():
            machine.settle(self._events.now_s, account=account)

    def assign(self, slots: Sequence[int]) -> None:
        """Give every slot a machine: first those that are paid for, then new ones, then any that comes later.

        Machines that are paid for and not needed are released.
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
        """Queue the slot, which has lost its machine, for another."""
        self._pending.append(slot)
        self._fill()

    def withdraw(self) -> None:
        """Let no slot wait for a machine any more."""
        self._available = len(self.machines) if self._pending else None
        self._pending.clear()

    def release(self, machine: Machine) -> None:
        """Stop paying for the machine."""
        machine.settle(self._events.now_s)
        self._released_s += self._events.now_s - machine.began_s
        machine.there = False
        del self.machines[machine.place]

    def _fill(self) -> None:
        """Give waiting slots the machines without a slot, then new ones."""
        for machine in list(self.machines.values()):
            if self._pending and machine.slot is None and machine.ready:
                machine.slot = self._pending.popleft()
                self._on_ready(self, machine, machine.slot)
        free = [place for place in self._there if place not in self.machines] if self._pending else []
        for place in free[: len(self._pending)]:
            machine = Machine(place, self._events.now_s, self.account)
            machine.slot = self._pending.popleft()
            self.machines[place] = machine
            self._events.after(self.pool.start_s, lambda machine=machine: self._started(machine))  # type: ignore[misc]

    def _started(self, machine: Machine) -> None:
        if machine.there:
            machine.ready = True
            machine.settle(self._events.now_s, "standing")
            if machine.slot is not None:
                self._on_ready(self, machine, machine.slot)

    def _next_change(self) -> None:
        change = next(self._changes, None)
        if change is not None:
            at_s, place, there = change
            self._events.at(at_s, lambda: self._change(place, there=there))

    def _change(self, place: int, *, there: bool) -> None:
        if there:
            self._there[place] = None
            self._fill()
        else:
            del self._there[place]
            machine = self.machines.get(place)
            if machine is not None:
                machine.account.losses += 1
                self.release(machine)
                self._on_lost(self, machine)
        self._next_change()
