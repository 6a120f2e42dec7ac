"""The processes on the crew's machines: they start, pull weights, and are members of an iteration's crew.

A crew that is started for each iteration has a process for each slot of the plan, which ends with the iteration. That
of a standing crew is in virtual_standing.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from tasks.crew_model.crew_member import EngineModel, ModelMember
from tasks.crew_model.events import Events
from tasks.forecasting.links import Links
from tasks.forecasting.machines import Machine, Stock
from tasks.forecasting.scenario import Policy
from tasks.forecasting.virtual_iteration import Iteration


@dataclass(kw_only=True, eq=False)
class Processes(ABC):
    """What both kinds of crews have in common.

    may_begin: whether an iteration of this number may still begin. stocks: the machines of each pool, by its name.
    """

    events: Events
    policy: Policy
    links: Links
    engines: Mapping[str, EngineModel]
    may_begin: Callable[[int], bool]
    stocks: dict[str, Stock] = field(default_factory=dict)
    _of_member: dict[tuple[int, str], tuple[Stock, Machine]] = field(default_factory=dict, init=False)

    @abstractmethod
    def begin(self, iteration: Iteration) -> None:
        """A plan is there."""

    @abstractmethod
    def rollout_ended(self, iteration: Iteration) -> None:
        """All responses of the iteration have ended."""

    def published(self, version: int) -> None:  # noqa: B027 - most crews need not know
        """A weight version is there."""

    @abstractmethod
    def before_conclusion(self, iteration: Iteration, following: Iteration | None) -> None:
        """Book all time until now that belongs to the iteration. following: the next one, if it is planned."""

    @abstractmethod
    def ready(self, stock: Stock, machine: Machine, slot: int) -> None:
        """A slot's machine has started: start the slot's process there."""

    @abstractmethod
    def lost(self, stock: Stock, machine: Machine) -> None:
        """A machine was lost; its slot starts again on the next one."""

    @abstractmethod
    def left(self, iteration: Iteration, member: ModelMember) -> None:
        """A member leaves before the iteration has ended."""

    def held(self, iteration: Iteration, member: ModelMember) -> None:  # noqa: B027
        """A member without weights holds something."""

    def enough(self, iteration: Iteration, member: ModelMember) -> bool:  # noqa: ARG002
        """Whether the member, which holds nothing, is to work on another iteration."""
        return False

    def present(self, iteration: Iteration) -> int:
        """How many members there are when the iteration's last response has ended, as a report counts them."""
        return iteration.crew.working

    def _enter(
        self, iteration: Iteration, stock: Stock, machine: Machine, slot: int, part: str | None = None
    ) -> ModelMember:
        """Let the machine's process claim in the iteration, whose account gets its time from now on."""
        account = iteration.accounts[stock.pool.name]
        machine.settle(self.events.now_s, part, account)
        member = iteration.crew.begin(slot, self.engines[stock.pool.name], account)
        machine.member = member
        self._of_member[iteration.number, member.name] = stock, machine
        return member

    def _pull(self, stock: Stock, machine: Machine, version: int, pulled: Callable[[], None]) -> None:
        size = self._pull_bytes(machine, version)
        machine.account.bytes_read += size
        machine.pulling = version
        machine.pull = self.links.pull(stock.pool.name, size, pulled)

    def _pull_bytes(self, machine: Machine, version: int) -> float:
        if machine.weight_version == version:
            return 0.0
        delta = self.policy.weights_delta_bytes
        follows = machine.weight_version is not None and machine.weight_version == version - 1
        return delta if follows and delta is not None else self.policy.weights_bytes

    def _stop_pull(self, stock: Stock, machine: Machine) -> None:
        if machine.pull is not None:
            self.links.stop(stock.pool.name, machine.pull)
            machine.pull = machine.pulling = None

    def _leave(self, iteration: Iteration, machine: Machine, part: str) -> None:
        """End the member on a machine, if there is one; the machine's time is spent on `part` from now on."""
        member = machine.member
        if member is not None and member.alive:
            machine.settle(self.events.now_s, part)
            iteration.crew.stop(member, notice=True)


@dataclass(kw_only=True, eq=False)
class MappedProcesses(Processes):
    """Each iteration's slots get processes of their own, one iteration at a time."""

    _current: Iteration | None = field(default=None, init=False)
    _at_barrier: list[Callable[[], None]] = field(default_factory=list, init=False)

    def begin(self, iteration: Iteration) -> None:
        self._current = iteration
        for name, stock in self.stocks.items():
            stock.settle(iteration.accounts[name])
            stock.assign([slot.slot for slot in iteration.plan.slots if slot.pool == name and slot.groups])

    def rollout_ended(self, iteration: Iteration) -> None:
        last = self.policy.max_staleness and not self.may_begin(iteration.number + 1)
        for stock in self.stocks.values():
            stock.withdraw()
            for machine in list(stock.machines.values()):
                self._leave(iteration, machine, "standing")
                if last or not stock.pool.kept:
                    stock.release(machine)

    def before_conclusion(self, iteration: Iteration, following: Iteration | None) -> None:  # noqa: ARG002
        if following is None:
            for stock in self.stocks.values():
                stock.settle()

    def ready(self, stock: Stock, machine: Machine, slot: int) -> None:
        iteration = self._now()
        self._end_pull(stock, machine)
        if not iteration.is_generated:
            machine.settle(self.events.now_s, "process")
            # In a thread of its own, as in tasks.sampling.session.pull_ahead.
            self._pull(stock, machine, iteration.version, partial(self._pulled, iteration, machine))
            self.events.after(stock.pool.process_s, partial(self._claim, iteration, stock, machine, slot))

    def lost(self, stock: Stock, machine: Machine) -> None:
        self._end_pull(stock, machine)
        if self._current is None:
            return
        if machine.member is not None and machine.member.alive:
            self._current.crew.stop(machine.member, notice=False)
        if machine.slot is not None and not self._current.is_generated:
            stock.want(machine.slot)

    def left(self, iteration: Iteration, member: ModelMember) -> None:
        stock, machine = self._of_member[iteration.number, member.name]
        self._leave(iteration, machine, "standing")
        machine.slot = None
        if not stock.pool.kept:
            stock.release(machine)

    def _claim(self, iteration: Iteration, stock: Stock, machine: Machine, slot: int) -> None:
        """The process runs: let it claim, and work as soon as the weights are there."""
        if iteration is not self._current or not machine.there:
            return
        if iteration.is_generated:
            machine.settle(self.events.now_s, "standing")
            return
        self._enter(iteration, stock, machine, slot, "transfer")
        if machine.pull is None:
            self._come_to_barrier(iteration, machine)

    def _pulled(self, iteration: Iteration, machine: Machine) -> None:
        machine.pull, machine.weight_version = None, iteration.version
        self._come_to_barrier(iteration, machine)

    def _come_to_barrier(self, iteration: Iteration, machine: Machine) -> None:
        """The machine has the weights: let it work, with a barrier when no other pulls."""
        self._at_barrier.append(partial(self._work, iteration, machine))
        if self.policy.transfer == "pull" or not self.links.active:
            self._pass_barrier()

    def _pass_barrier(self) -> None:
        waiting, self._at_barrier = self._at_barrier, []
        for work in waiting:
            work()

    def _work(self, iteration: Iteration, machine: Machine) -> None:
        """Let the machine's member decode, if it has claimed."""
        member = machine.member
        if iteration is self._current and machine.there and member is not None and member.state == "loading":
            machine.settle(self.events.now_s)
            iteration.crew.work(member)

    def _end_pull(self, stock: Stock, machine: Machine) -> None:
        if machine.pull is not None:
            self._stop_pull(stock, machine)
            if not self.links.active:
                self._pass_barrier()

    def _now(self) -> Iteration:
        if self._current is None:
            raise RuntimeError("no iteration has begun")
        return self._current
