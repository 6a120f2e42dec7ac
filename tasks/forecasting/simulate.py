"""Simulates a run in virtual time: the production planner and rebalancing, machines by a trace, and a ledger.

There is one rollout at a time. Without one_step_off the next one begins when the weights are published. With it, the
next one begins when the previous rollout has ended and the weights of the training before that are published.
"""

import random
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from storage.records import TRAIN_POOL
from tasks.forecasting.availability import changes
from tasks.forecasting.events import Events, Stalled
from tasks.forecasting.expectations import Expectations
from tasks.forecasting.knowledge import Knowledge
from tasks.forecasting.links import Links
from tasks.forecasting.machines import Machine, Stock
from tasks.forecasting.response_lengths import Ints, ResponseLengths
from tasks.forecasting.results import SimulatedIteration, SimulatedRun
from tasks.forecasting.scenario import Scenario
from tasks.forecasting.virtual_crew import Crew
from tasks.forecasting.virtual_ledger import Account, mean_members
from tasks.forecasting.virtual_member import EngineModel, Member
from tasks.forecasting.virtual_responses import Responses
from tasks.forecasting.virtual_trainer import Training
from tasks.planning.iteration_plan import BudgetExceeded, IterationPlan, plan_iteration
from tasks.planning.offer import StepWaits

# A run is given up if no response and no training ends for this long: its machines never last long enough.
PATIENCE_S = 7 * 24 * 3600.0
# The distance between two pools' seeds, more than the number of seeds that anyone simulates.
POOL_SEEDS = 1_000_003


def simulate(scenario: Scenario, *, seed: int, span_s: float | None = None) -> SimulatedRun:
    """Simulate the scenario; the same result for the same seed.

    span_s: no rollout begins after this time; None: only work.iterations count. The planner knows the pools' step times
    from the start, as after a probe, and learns losses, waits and lengths on the way. Raises Stalled if no member is
    left that could generate, and TraceError or ScenarioError for files that cannot be used.
    """
    return _Simulation(scenario, seed, span_s).run()


@dataclass(kw_only=True)
class _Iteration:
    """An iteration under way. next_s: when the crew began the next one."""

    number: int
    plan: IterationPlan
    prompts: Ints
    lengths: Ints
    responses: Responses
    training: Training
    accounts: dict[str, Account]
    began_s: float
    crew: Crew = field(init=False)
    machines: dict[str, tuple[Stock, Machine]] = field(default_factory=dict)
    members_at_end: int = 0
    next_s: float | None = None

    @property
    def planned(self) -> dict[str, int]:
        """The number of members with work, by pool."""
        return dict(Counter(slot.pool for slot in self.plan.slots if slot.groups))


class _Simulation:
    def __init__(self, scenario: Scenario, seed: int, span_s: float | None) -> None:
        self._scenario, self._seed, self._span_s = scenario, seed, span_s
        policy, trainer = scenario.policy, scenario.trainer
        self._policy = policy
        self._events = Events()
        self._lengths = ResponseLengths(scenario.work, seed)
        self._expectations = Expectations(policy.predictor, policy.recall, seed)
        self._knowledge = Knowledge(scenario)
        self._links = Links(self._events, trainer.upload_gbps, {pool.name: pool.link_gbps for pool in scenario.pools})
        self._at_barrier: list[partial[None]] = []
        self._engines = {
            pool.name: EngineModel.of(pool.step_time, pool.responses_max, pool.prefill_tokens_per_s)
            for pool in scenario.pools
        }
        self._engines[TRAIN_POOL] = EngineModel.of(
            trainer.step_time, trainer.responses_max, trainer.prefill_tokens_per_s
        )
        self._stocks = {
            pool.name: Stock(
                self._events,
                pool,
                # Each pool has its own seed, so that no two pools lose their machines together.
                changes(pool.availability, pool.places or pool.count, seed + POOL_SEEDS * number),
                on_ready=self._process,
                on_lost=self._lost,
            )
            for number, pool in enumerate(scenario.pools)
        }
        self._current: _Iteration | None = None
        self._training: _Iteration | None = None
        self._trained = -1
        self._trained_s = 0.0
        self._over = False
        self._concluded: list[SimulatedIteration] = []
        # Of the iterations begun.
        self._tokens: list[int] = []
        self._stopped: str | None = None

    def run(self) -> SimulatedRun:
        # After the events at second 0 that make machines available.
        self._events.at(0.0, lambda: self._begin(0))
        self._events.run(self._is_over)
        return SimulatedRun(iterations=tuple(self._concluded), stopped=self._stopped)

    def _is_over(self) -> bool:
        waited_s = self._events.now_s - (self._current.crew.progress_s if self._current else 0.0)
        if waited_s > PATIENCE_S and self._training is self._current:
            raise Stalled(f"no response has ended for {waited_s / 3600:.0f} h, at second {self._events.now_s:.0f}")
        return self._over

    def _begin(self, number: int) -> None:
        """Plan an iteration and begin its slots and, if the trainer is free, its training."""
        prompts, lengths = self._lengths.prompts(number), self._lengths.lengths(number)
        expected = self._expectations.expected(number, prompts, lengths)
        try:
            available = {name: stock.available for name, stock in self._stocks.items()}
            there = {name: stock.ready for name, stock in self._stocks.items()}
            plan = plan_iteration(self._knowledge.request(expected, available, there))
        except BudgetExceeded as error:
            self._stopped = str(error)
            self._go_on()
            return
        trainer, now_s = self._scenario.trainer, self._events.now_s
        accounts = {
            pool.name: self._account(pool.name, pool.usd_per_h, pool.gpus, pool.egress_usd_per_gb)
            for pool in self._scenario.pools
        }
        accounts[TRAIN_POOL] = self._account(TRAIN_POOL, trainer.usd_per_h, trainer.gpus)
        responses = Responses(lengths, plan.slots)
        replayed = self._tokens[number - number % trainer.replay_interval : number]
        self._tokens.append(sum(responses.group_tokens))
        iteration = _Iteration(
            number=number,
            plan=plan,
            prompts=prompts,
            lengths=lengths,
            responses=responses,
            training=Training(
                self._events,
                trainer,
                self._policy.planning,
                accounts[TRAIN_POOL],
                responses,
                streaming=self._policy.streaming,
                in_order=self._policy.in_order,
                on_end=self._training_ended,
                replay_tokens=sum(replayed),
            ),
            accounts=accounts,
            began_s=now_s,
        )
        iteration.crew = Crew(
            self._events,
            responses,
            plan.slots,
            self._policy,
            self._scenario.work.prompt_tokens,
            random.Random(f"{self._seed} {number}"),
            on_group=iteration.training.group_ended,
            on_end=self._rollout_ended,
            on_leave=self._left,
            on_members=iteration.training.members_changed,
        )
        if self._current is not None:
            self._current.next_s = now_s
        self._current = iteration
        for name, stock in self._stocks.items():
            stock.settle(accounts[name])
            stock.assign([slot.slot for slot in plan.slots if slot.pool == name and slot.groups])
        if self._training is None:
            self._train(iteration)

    def _train(self, iteration: _Iteration) -> None:
        self._training = iteration
        iteration.accounts[TRAIN_POOL].add("standing", self._events.now_s - self._trained_s)
        slots = [slot.slot for slot in iteration.plan.slots if slot.pool == TRAIN_POOL and slot.groups]
        seeding = iteration.plan.seeding
        # If the crew was given nothing, there is no member to hand over to.
        alone = slots and not set(iteration.planned) - {TRAIN_POOL}
        seeding_s = None if alone else 0.0 if seeding is None else seeding.seeding_s
        iteration.training.begin(iteration.crew, slots, self._engines[TRAIN_POOL], seeding_s)

    def _rollout_ended(self) -> None:
        iteration = self._now()
        iteration.members_at_end = iteration.crew.working
        last = self._policy.one_step_off and not self._may_begin(iteration.number + 1)
        for stock in self._stocks.values():
            stock.withdraw()
            for machine in list(stock.machines.values()):
                self._leave(iteration, stock, machine)
                if last or not stock.pool.kept:
                    stock.release(machine)
        iteration.training.rollout_ended()
        self._go_on()

    def _training_ended(self) -> None:
        iteration = self._training
        if iteration is None:
            raise RuntimeError("a training has ended that was not begun")
        if iteration is self._current:
            for stock in self._stocks.values():
                stock.settle()
        self._conclude(iteration)
        self._training, self._trained, self._trained_s = None, iteration.number, self._events.now_s
        if self._now() is not iteration:
            self._train(self._now())
        self._go_on()

    def _go_on(self) -> None:
        """Begin the next iteration if its time has come, or end."""
        current = self._current
        number = 0 if current is None else current.number
        if current is not None and (
            current.crew.ended_s is None or self._trained < number - (1 if self._policy.one_step_off else 0)
        ):
            return
        if current is not None and self._may_begin(number + 1):
            self._begin(number + 1)
        elif current is None or self._trained == number:
            self._over = True

    def _may_begin(self, number: int) -> bool:
        in_time = self._span_s is None or self._events.now_s < self._span_s
        return number < self._scenario.work.iterations and in_time and self._stopped is None

    def _conclude(self, iteration: _Iteration) -> None:
        now_s, accounts = self._events.now_s, iteration.accounts
        training, crew = iteration.training, iteration.crew
        ended_s = now_s if crew.ended_s is None else crew.ended_s
        left_s = ended_s if self._policy.one_step_off else now_s
        left_s = left_s if iteration.next_s is None else iteration.next_s
        for account in accounts.values():
            account.close(left_s, self._policy.flush_interval_s, self._policy.heartbeat_interval_s)
        lives = [life for name in self._stocks for life in accounts[name].lives]
        alone_s = iteration.began_s + self._scenario.trainer.process_s
        first_s = min((life.worked_s for life in lives if life.worked_s is not None), default=alone_s)
        waits = StepWaits(
            wait_train_s=training.wait_s,
            wait_remote_s=max(0.0, min(left_s, training.ended_s) - ended_s),
            train_s=training.train_s - training.retrain_s,
            rollout_s=max(0.0, ended_s - first_s),
            members=mean_members(lives, first_s, ended_s),
            members_at_end=iteration.members_at_end,
            generated_s=training.generated_s,
        )
        result = SimulatedIteration(
            iteration=iteration.number,
            duration_s=now_s - self._trained_s,
            rollout_s=ended_s - iteration.began_s,
            train_s=training.train_s,
            retrain_s=training.retrain_s,
            wait_train_s=waits.wait_train_s,
            wait_remote_s=waits.wait_remote_s,
            control_s=now_s - training.ended_s,
            seeding_s=training.seeding_s,
            members={name: mean_members(accounts[name].lives, first_s, ended_s) for name in self._stocks},
            planned=iteration.planned,
            members_at_end=iteration.members_at_end,
            tokens=sum(iteration.responses.length),
            tokens_decoded=sum(account.decoded for account in accounts.values()),
            tokens_regenerated=sum(account.wasted for account in accounts.values()),
            prefill_tokens=sum(life.prefill_tokens for account in accounts.values() for life in account.lives),
            moved=crew.moved,
            losses={name: account.losses for name, account in accounts.items()},
            seconds={name: dict(account.seconds) for name, account in accounts.items()},
            usd={name: account.usd() for name, account in accounts.items()},
            gpu_s=sum(account.machine_s * account.gpus for account in accounts.values()),
            decisions=iteration.plan.decisions,
        )
        self._concluded.append(result)
        self._knowledge.learn(result, waits, iteration.plan.seeding)
        self._expectations.learn(iteration.prompts, iteration.lengths)

    def _process(self, stock: Stock, machine: Machine, slot: int) -> None:
        """A slot's machine has started: start the slot's process there."""
        iteration = self._now()
        self._stop_pull(stock, machine)
        if iteration.crew.ended_s is None:
            machine.settle(stock.account, self._events.now_s, "process")
            self._events.after(stock.pool.process_s, partial(self._claim, iteration, stock, machine, slot))

    def _claim(self, iteration: _Iteration, stock: Stock, machine: Machine, slot: int) -> None:
        """The process runs: let it claim, and pull the weights."""
        if iteration is not self._current or not machine.there:
            return
        if iteration.crew.ended_s is not None:
            machine.settle(stock.account, self._events.now_s, "standing")
            return
        machine.settle(stock.account, self._events.now_s, "transfer")
        member = iteration.crew.begin(slot, self._engines[stock.pool.name], stock.account)
        machine.member = member
        iteration.machines[member.name] = stock, machine
        version = max(0, iteration.number - (1 if self._policy.one_step_off else 0))
        size = self._pull_bytes(machine, version)
        stock.account.bytes_read += size
        pulled = partial(self._pulled, iteration, stock, machine, member, version)
        machine.pull = self._links.pull(stock.pool.name, size, pulled)

    def _pull_bytes(self, machine: Machine, version: int) -> float:
        if machine.weight_version == version:
            return 0.0
        delta = self._policy.weights_delta_bytes
        follows = machine.weight_version is not None and machine.weight_version == version - 1
        return delta if follows and delta is not None else self._policy.weights_bytes

    def _pulled(self, iteration: _Iteration, stock: Stock, machine: Machine, member: Member, version: int) -> None:
        machine.pull, machine.weight_version = None, version
        self._at_barrier.append(partial(self._work, iteration, stock, machine, member))
        if self._policy.transfer == "pull" or not self._links.active:
            self._pass_barrier()

    def _pass_barrier(self) -> None:
        waiting, self._at_barrier = self._at_barrier, []
        for work in waiting:
            work()

    def _work(self, iteration: _Iteration, stock: Stock, machine: Machine, member: Member) -> None:
        if iteration is self._current and machine.there and member.state == "loading":
            machine.settle(stock.account, self._events.now_s)
            iteration.crew.work(member)

    def _stop_pull(self, stock: Stock, machine: Machine) -> None:
        if machine.pull is not None:
            self._links.stop(stock.pool.name, machine.pull)
            machine.pull = None
            if not self._links.active:
                self._pass_barrier()

    def _lost(self, stock: Stock, machine: Machine) -> None:
        """A machine was lost; its slot starts again on the next one."""
        self._stop_pull(stock, machine)
        iteration = self._current
        if iteration is None:
            return
        if machine.member is not None and machine.member.alive:
            iteration.crew.stop(machine.member, notice=False)
        if machine.slot is not None and iteration.crew.ended_s is None:
            stock.want(machine.slot)

    def _left(self, member: Member) -> None:
        """A member leaves before the iteration has ended."""
        stock, machine = self._now().machines[member.name]
        self._leave(self._now(), stock, machine)
        machine.slot = None
        if not stock.pool.kept:
            stock.release(machine)

    def _leave(self, iteration: _Iteration, stock: Stock, machine: Machine) -> None:
        """End the process on a machine, if there is one."""
        member = machine.member
        if member is not None and member.alive:
            machine.settle(stock.account, self._events.now_s, "standing")
            iteration.crew.stop(member, notice=True)

    def _account(self, name: str, usd_per_h: float, gpus: float, egress_usd_per_gb: float = 0.0) -> Account:
        policy = self._policy
        return Account(name, usd_per_h, gpus, egress_usd_per_gb, policy.put_usd, policy.get_usd)

    def _now(self) -> _Iteration:
        if self._current is None:
            raise RuntimeError("no iteration has begun")
        return self._current
