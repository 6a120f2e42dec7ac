"""The processes on the crew's machines: a process starts, pulls weights, and is a member of an iteration's crew.

A crew of one iteration has a process for each slot of the plan, and every process ends with the iteration. For
processes of a standing crew see virtual_standing.
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
    """The common part of both kinds of crews.

    Attributes:
        events: the events of the simulation.
        policy: policy of the scenario.
        links: the links over which machines pull weights.
        engines: engine model by pool.
        may_begin: True if the iteration with the given number may still begin.
        stocks: machines by pool.
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
        """A plan exists."""

    @abstractmethod
    def rollout_ended(self, iteration: Iteration) -> None:
        """All responses of the iteration have ended."""

    def published(self, version: int) -> None:  # noqa: B027 - most crews need not know
        """A weight version exists."""

    @abstractmethod
    def before_conclusion(self, iteration: Iteration, following: Iteration | None) -> None:
        """Book the iteration's time until now. following: the next iteration; None if not planned."""

    @abstractmethod
    def ready(self, stock: Stock, machine: Machine, slot: int) -> None:
        """A slot's machine has started: start the slot's process there."""

    @abstractmethod
    def lost(self, stock: Stock, machine: Machine) -> None:
        """A machine was lost; the slot starts again on the next machine."""

    @abstractmethod
    def left(self, iteration: Iteration, member: ModelMember) -> None:
        """A member leaves before the iteration has ended."""

    def held(self, iteration: Iteration, member: ModelMember) -> None:  # noqa: B027
        """A member without weights holds responses."""

    def enough(self, iteration: Iteration, member: ModelMember) -> bool:  # noqa: ARG002
        """True if a member without responses should go on to another iteration."""
        return False

    def present(self, iteration: Iteration) -> int:
        """The number of members at the end of the iteration's last response, by a report's count."""
        return iteration.crew.working

    def _enter(
        self, iteration: Iteration, stock: Stock, machine: Machine, slot: int, part: str | None = None
    ) -> ModelMember:
        """Let the machine's process claim in the iteration; the iteration's account gets the time from now on."""
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
        """End the member on a machine, if any; `part` is the purpose of the machine's time from now on."""
        member = machine.member
        if member is not None and member.alive:
            machine.settle(self.events.now_s, part)
            iteration.crew.stop(member, notice=True)


@dataclass(kw_only=True, eq=False)
class MappedProcesses(Processes):
    """A process for each slot of the iteration's plan, for a single iteration at a time."""

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
            # In a thread of its own, as in tasks.sampling.session.pulled_model.
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
        """Let a started process claim, and work as soon as the weights have arrived."""
        if iteration is not self._current or not machine.present:
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
        """Let a machine with weights work; with transfer "barrier", all machines begin at the end of the last pull."""
        self._at_barrier.append(partial(self._work, iteration, machine))
        if self.policy.transfer == "pull" or not self.links.active:
            self._pass_barrier()

    def _pass_barrier(self) -> None:
        waiting, self._at_barrier = self._at_barrier, []
        for work in waiting:
            work()

    def _work(self, iteration: Iteration, machine: Machine) -> None:
        """Let the machine's member decode after its claim."""
        member = machine.member
        if iteration is self._current and machine.present and member is not None and member.state == "loading":
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
