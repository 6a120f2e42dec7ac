"""Simulates a run in virtual time: the production planner and rebalancing, machines by a trace, and a ledger.

With max_staleness s, iteration n + s is planned at the conclusion of iteration n - 1. A crew of one iteration has one
rollout at a time, so the next rollout also waits for the end of the previous rollout; a standing crew goes on.
"""

import random
from collections.abc import Callable
from functools import partial

from storage.records.records import TRAIN_POOL
from tasks.crew_model.accounts import Account
from tasks.crew_model.crew import CrewModel
from tasks.crew_model.crew_member import EngineModel
from tasks.crew_model.events import Events, Stalled
from tasks.crew_model.response_progress import Responses
from tasks.forecasting.availability import changes
from tasks.forecasting.expectations import Expectations
from tasks.forecasting.knowledge import Knowledge
from tasks.forecasting.links import Links
from tasks.forecasting.machines import Stock
from tasks.forecasting.response_lengths import ResponseLengths, tool_answers
from tasks.forecasting.results import SimulatedIteration, SimulatedRun
from tasks.forecasting.scenario import Scenario
from tasks.forecasting.scorers import Scoring
from tasks.forecasting.virtual_iteration import Iteration
from tasks.forecasting.virtual_processes import MappedProcesses, Processes
from tasks.forecasting.virtual_standing import StandingProcesses
from tasks.forecasting.virtual_trainer import Training
from tasks.planning.iteration_plan import BudgetExceeded, plan_iteration

# A run is given up if no response and no training ends for this long: its machines never last long enough.
PATIENCE_S = 7 * 24 * 3600.0
# The distance between two pools' seeds, more than the number of seeds that anyone simulates.
POOL_SEEDS = 1_000_003


def simulate(scenario: Scenario, *, seed: int, span_s: float | None = None) -> SimulatedRun:
    """Simulate the scenario; a seed always gives the same result.

    The planner knows the pools' step times from the start, as after a probe, and learns losses, waits and lengths from
    the simulated iterations. Raises Stalled if no member is left for generating, and TraceError or ScenarioError for
    files that cannot be used.

    Args:
        scenario: the scenario.
        seed: seed of lengths, traces and work searches.
        span_s: second after which no rollout begins; None: only work.iterations count.
    """
    return _Simulation(scenario, seed, span_s).run()


class _Simulation:
    def __init__(self, scenario: Scenario, seed: int, span_s: float | None) -> None:
        self._scenario, self._seed, self._span_s = scenario, seed, span_s
        policy, trainer = scenario.policy, scenario.trainer
        self._policy = policy
        self._events = Events()
        self._lengths = ResponseLengths(scenario.work, seed)
        self._expectations = Expectations(policy.predictor, policy.recall, seed)
        self._knowledge = Knowledge(scenario)
        links = Links(self._events, trainer.upload_gbps, {pool.name: pool.link_gbps for pool in scenario.pools})
        self._engines = {
            pool.name: EngineModel.of(pool.step_time, pool.responses_max, pool.prefill_tokens_per_s)
            for pool in scenario.pools
        }
        self._engines[TRAIN_POOL] = EngineModel.of(
            trainer.step_time, trainer.responses_max, trainer.prefill_tokens_per_s
        )
        kind = StandingProcesses if policy.crew == "standing" else MappedProcesses
        self._processes: Processes = kind(
            events=self._events, policy=policy, links=links, engines=self._engines, may_begin=self._may_begin
        )
        self._stocks = self._processes.stocks = {
            pool.name: Stock(
                self._events,
                pool,
                # Each pool has its own seed, so that no two pools lose their machines together.
                changes(pool.availability, pool.places or pool.count, seed + POOL_SEEDS * number),
                on_ready=self._processes.ready,
                on_lost=self._processes.lost,
            )
            for number, pool in enumerate(scenario.pools)
        }
        # Planned and not concluded, in order.
        self._open: dict[int, Iteration] = {}
        self._newest = self._trained = -1
        self._training: Iteration | None = None
        self._trained_s = 0.0
        self._over = False
        self._concluded: list[SimulatedIteration] = []
        # By the newest plan.
        self._planned_width: dict[str, int] | None = None
        # Of the iterations begun.
        self._tokens: list[int] = []
        self._stopped: str | None = None

    def run(self) -> SimulatedRun:
        # After the events at second 0 that make machines available.
        self._events.at(0.0, self._go_on)
        self._events.run(self._is_over)
        paid_s = {name: stock.paid_s for name, stock in self._stocks.items()}
        return SimulatedRun(iterations=tuple(self._concluded), stopped=self._stopped, paid_s=paid_s)

    def _is_over(self) -> bool:
        waited_s = self._events.now_s - max((one.crew.progress_s for one in self._open.values()), default=0.0)
        if waited_s > PATIENCE_S and not (self._training and self._training.is_generated):
            raise Stalled(f"no response has ended for {waited_s / 3600:.0f} h, at second {self._events.now_s:.0f}")
        return self._over

    def _begin(self, number: int) -> None:
        """Plan an iteration and begin the slots and, with a free trainer, the training."""
        prompts, lengths = self._lengths.prompts(number), self._lengths.lengths(number)
        expected = self._expectations.expected(number, prompts, lengths)
        try:
            available = {name: stock.available for name, stock in self._stocks.items()}
            present = {name: stock.ready for name, stock in self._stocks.items()}
            plan = plan_iteration(self._knowledge.request(expected, available, present, self._planned_width))
        except BudgetExceeded as error:
            self._stopped = str(error)
            return
        trainer, now_s = self._scenario.trainer, self._events.now_s
        accounts = {
            pool.name: self._account(pool.name, pool.usd_per_h, pool.gpus, pool.egress_usd_per_gb)
            for pool in self._scenario.pools
        }
        accounts[TRAIN_POOL] = self._account(TRAIN_POOL, trainer.usd_per_h, trainer.gpus)
        tools = self._scenario.work.tools
        answers = () if tools is None else tool_answers(tools, lengths, self._seed, number)
        responses = Responses(lengths, plan.slots, answers)
        replayed = self._tokens[number - number % trainer.replay_interval : number]
        self._tokens.append(sum(responses.group_tokens))
        iteration = Iteration(
            number=number,
            version=max(0, number - self._policy.max_staleness),
            plan=plan,
            prompts=prompts,
            lengths=lengths,
            responses=responses,
            training=Training(
                self._events,
                trainer,
                self._policy,
                accounts[TRAIN_POOL],
                responses,
                streaming=self._policy.streaming,
                in_order=self._policy.in_order,
                on_published=lambda: self._processes.published(number + 1),
                on_end=self._training_ended,
                replay_tokens=sum(replayed),
            ),
            accounts=accounts,
            began_s=now_s,
        )
        iteration.crew = CrewModel(
            self._events,
            responses,
            plan.slots,
            self._policy.crew_rules,
            self._scenario.work.prompt_tokens,
            random.Random(f"{self._seed} {number}"),
            observation_tokens=0 if tools is None else tools.observation_tokens,
            on_group=self._on_group(iteration),
            on_end=partial(self._rollout_ended, iteration),
            on_leave=partial(self._processes.left, iteration),
            on_members=iteration.training.members_changed,
            on_held=partial(self._processes.held, iteration),
            enough=partial(self._processes.enough, iteration) if self._policy.crew == "standing" else None,
        )
        if self._newest in self._open:
            self._open[self._newest].next_s = now_s
        self._newest, self._open[number] = number, iteration
        self._planned_width = iteration.planned_crew
        self._processes.begin(iteration)
        if self._training is None:
            self._train(iteration)

    def _on_group(self, iteration: Iteration) -> Callable[[int], None]:
        """What follows the end of a group: the record, then the scores if there are scorers, then the training."""
        scorers, training = self._scenario.scorers, iteration.training
        then = training.group_complete
        if scorers is not None:
            account = iteration.accounts[scorers.name] = self._account(scorers.name, scorers.usd_per_h, scorers.gpus)
            then = Scoring(self._events, scorers, account, iteration.responses.group_tokens, then).group_ended

        def ended(group: int) -> None:
            training.group_ended(group)
            then(group)

        return ended

    def _train(self, iteration: Iteration) -> None:
        self._training = iteration
        if self._scenario.trainer.phase is None:
            iteration.accounts[TRAIN_POOL].add("standing", self._events.now_s - self._trained_s)
        slots = [slot.slot for slot in iteration.plan.slots if slot.pool == TRAIN_POOL and slot.groups]
        seeding = iteration.plan.seeding
        # If the crew was given nothing, there is no member to hand over to.
        alone = slots and not iteration.planned_crew
        seeding_s = None if alone else 0.0 if seeding is None else seeding.seeding_s
        iteration.training.begin(iteration.crew, slots, self._engines[TRAIN_POOL], seeding_s)

    def _rollout_ended(self, iteration: Iteration) -> None:
        iteration.members_at_end = self._processes.present(iteration)
        self._processes.rollout_ended(iteration)
        iteration.training.rollout_ended()
        self._go_on()

    def _training_ended(self) -> None:
        iteration = self._training
        if iteration is None:
            raise RuntimeError("a training has ended that was not begun")
        following = self._open.get(iteration.number + 1)
        self._processes.before_conclusion(iteration, following)
        self._conclude(iteration)
        del self._open[iteration.number]
        self._training, self._trained, self._trained_s = None, iteration.number, self._events.now_s
        if following is not None:
            self._train(following)
        self._go_on()

    def _go_on(self) -> None:
        """Begin the iterations that are due, or end."""
        while self._is_next_due() and self._may_begin(self._newest + 1):
            self._begin(self._newest + 1)
        if self._trained == self._newest:
            self._over = True

    def _is_next_due(self) -> bool:
        newest = self._open.get(self._newest)
        waits = self._policy.crew == "iteration" and newest is not None and not newest.is_generated
        return not waits and self._trained >= self._newest - self._policy.max_staleness

    def _may_begin(self, number: int) -> bool:
        in_time = self._span_s is None or self._events.now_s < self._span_s
        return number < self._scenario.work.iterations and in_time and self._stopped is None

    def _conclude(self, iteration: Iteration) -> None:
        now_s, policy, pools = self._events.now_s, self._policy, list(self._stocks)
        for account in iteration.accounts.values():
            account.close(iteration.left_s(policy, now_s), policy.flush_interval_s, policy.heartbeat_interval_s)
        alone_s = iteration.began_s + self._scenario.trainer.process_s
        waits = iteration.waits(pools, policy, alone_s, now_s)
        result = iteration.concluded(pools, waits, alone_s, self._trained_s, now_s)
        self._concluded.append(result)
        self._knowledge.learn(result, waits, iteration.plan.seeding, iteration.lengths)
        self._expectations.learn(iteration.prompts, iteration.lengths)

    def _account(self, name: str, usd_per_h: float, gpus: float, egress_usd_per_gb: float = 0.0) -> Account:
        policy = self._policy
        return Account(name, usd_per_h, gpus, egress_usd_per_gb, policy.put_usd, policy.get_usd)
