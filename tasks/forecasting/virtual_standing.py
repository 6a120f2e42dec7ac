"""The processes of a standing crew in virtual time; each process fills the slot of its number in every plan.

A process chooses its next iteration as in tasks.sampling.session.route and leaves an iteration as in
tasks.sampling.session.state, with two simplifications: a waiting process sees a plan at once, and an iteration closes
at the end of its last response. The time of waiting for a plan is booked to the oldest open iteration; a report counts
the time for the following iteration.
"""

from dataclasses import dataclass, field
from functools import partial

from tasks.crew_model.crew_member import ModelMember
from tasks.forecasting.machines import Machine, Stock
from tasks.forecasting.virtual_iteration import Iteration
from tasks.forecasting.virtual_processes import Processes


@dataclass(kw_only=True, eq=False)
class StandingProcesses(Processes):
    """Processes that stay until the last iteration has been generated, with engine and weights."""

    # Planned and not concluded, in order.
    _open: dict[int, Iteration] = field(default_factory=dict, init=False)
    _place: dict[Machine, Iteration] = field(default_factory=dict, init=False)
    _published: int = field(default=0, init=False)
    _over: bool = field(default=False, init=False)

    def begin(self, iteration: Iteration) -> None:
        is_first = not iteration.number
        if not self._open:
            for name, stock in self.stocks.items():
                stock.settle(iteration.accounts[name])
        self._open[iteration.number] = iteration
        for name, stock in self.stocks.items():
            if is_first:
                stock.assign([slot.slot for slot in iteration.plan.slots if slot.pool == name])
            for machine in list(stock.machines.values()):
                if machine.entered >= 0 and (machine.member is None or not machine.member.alive):
                    self._go_on(stock, machine)

    def rollout_ended(self, iteration: Iteration) -> None:
        working = [
            (stock, machine)
            for stock in self.stocks.values()
            for machine in stock.machines.values()
            if machine.member is not None and machine.member.alive and self._place[machine] is iteration
        ]
        for _, machine in working:
            self._leave(iteration, machine, "idle")
        if all(one.is_generated for one in self._open.values()) and not self.may_begin(max(self._open) + 1):
            self._over = True
            for stock in self.stocks.values():
                stock.withdraw()
                for machine in list(stock.machines.values()):
                    self._stop_pull(stock, machine)
                    stock.release(machine)
        for stock, machine in working:
            if machine.present:
                self._go_on(stock, machine)

    def published(self, version: int) -> None:
        self._published = version
        for stock in self.stocks.values():
            for machine in stock.machines.values():
                if machine.entered >= 0 and (machine.member is None or not machine.member.alive):
                    self._equip(stock, machine, version)

    def before_conclusion(self, iteration: Iteration, following: Iteration | None) -> None:
        del self._open[iteration.number]
        for name, stock in self.stocks.items():
            account = None if following is None else following.accounts[name]
            stock.account = account or stock.account
            for machine in stock.machines.values():
                if machine.account is iteration.accounts[name]:
                    machine.settle(self.events.now_s, account=account)

    def ready(self, stock: Stock, machine: Machine, slot: int) -> None:  # noqa: ARG002
        machine.settle(self.events.now_s, "process")
        # As Route.first_weights: the pull goes on while the engine starts.
        versions = (one.version for one in self._open.values() if not one.is_generated)
        version = next(versions, self._published)
        self._pull(stock, machine, version, partial(self._pulled, machine, version))
        self.events.after(stock.pool.process_s, partial(self._started, stock, machine))

    def lost(self, stock: Stock, machine: Machine) -> None:
        self._stop_pull(stock, machine)
        if machine.member is not None and machine.member.alive:
            self._place[machine].crew.stop(machine.member, notice=False)
        if machine.slot is not None and not self._over:
            stock.want(machine.slot)

    def left(self, iteration: Iteration, member: ModelMember) -> None:
        stock, machine = self._of_member[iteration.number, member.name]
        self._leave(iteration, machine, "idle")
        self._go_on(stock, machine)

    def held(self, iteration: Iteration, member: ModelMember) -> None:
        stock, machine = self._of_member[iteration.number, member.name]
        self._equip(stock, machine, iteration.version)

    def enough(self, iteration: Iteration, member: ModelMember) -> bool:
        """True if a member without responses should go on to another iteration."""
        _, machine = self._of_member[iteration.number, member.name]
        following = self._next(machine)
        return following is not None and following is not iteration

    def present(self, iteration: Iteration) -> int:  # noqa: ARG002
        """Members that have entered any iteration: members ahead of `iteration` or behind are not missing."""
        return sum(machine.entered >= 0 for stock in self.stocks.values() for machine in stock.machines.values())

    def _started(self, stock: Stock, machine: Machine) -> None:
        if machine.present:
            machine.entered = min(self._open, default=machine.entered + 1) - 1
            machine.settle(self.events.now_s, "idle")
            self._go_on(stock, machine)

    def _next(self, machine: Machine) -> Iteration | None:
        """As Route.next: the next planned iteration after the machine's last, or else the oldest open; None: none."""
        unended = [number for number, one in self._open.items() if not one.is_generated]
        ahead = [number for number in unended if number > machine.entered]
        number = min(ahead or unended, default=None)
        return None if number is None else self._open[number]

    def _go_on(self, stock: Stock, machine: Machine) -> None:
        """Enter the next iteration, or wait with the newest weights."""
        iteration = self._next(machine)
        if iteration is None or machine.slot is None:
            machine.entered = max(machine.entered, 0)
            machine.settle(self.events.now_s, "idle", stock.account)
            self._equip(stock, machine, self._published)
            return
        machine.entered = max(machine.entered, iteration.number)
        self._place[machine] = iteration
        member = self._enter(iteration, stock, machine, machine.slot)
        if machine.weight_version == iteration.version:
            iteration.crew.work(member)
        elif member.waiting:
            self._equip(stock, machine, iteration.version)

    def _equip(self, stock: Stock, machine: Machine, version: int) -> None:
        """Start pulling a version, unless the machine holds or pulls the version already."""
        if machine.pulling == version:
            machine.settle(self.events.now_s, "transfer")
            return
        self._stop_pull(stock, machine)
        if machine.weight_version != version:
            machine.settle(self.events.now_s, "transfer")
            self._pull(stock, machine, version, partial(self._pulled, machine, version))

    def _pulled(self, machine: Machine, version: int) -> None:
        machine.pull = machine.pulling = None
        machine.weight_version = version
        machine.settle(self.events.now_s, "idle" if machine.entered >= 0 else None)
        member = machine.member
        if member is not None and member.state == "loading" and self._place[machine].version == version:
            self._place[machine].crew.work(member)
