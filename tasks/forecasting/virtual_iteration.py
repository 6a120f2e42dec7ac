"""An iteration under way in virtual time, and its figures at the conclusion."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from storage.records.records import TRAIN_POOL
from tasks.crew_model.accounts import Account, mean_members
from tasks.crew_model.crew import CrewModel
from tasks.crew_model.response_progress import Responses
from tasks.forecasting.response_lengths import Ints
from tasks.forecasting.results import SimulatedIteration
from tasks.forecasting.scenario import Policy
from tasks.forecasting.virtual_trainer import Training
from tasks.planning.capacity import StepWaits
from tasks.planning.iteration_plan import IterationPlan


@dataclass(kw_only=True)
class Iteration:
    """An iteration under way.

    Attributes:
        number: number of the iteration.
        version: weight version for sampling.
        plan: the plan.
        prompts: prompt numbers, [groups].
        lengths: response lengths, [groups, num_generations] tokens.
        responses: progress of the responses.
        training: the iteration's training.
        accounts: accounts by pool, with the trainer's.
        began_s: second of the plan.
        crew: the crew's event model.
        members_at_end: members at the end of the last response.
        next_s: second of the next iteration's plan; None before.
    """

    number: int
    version: int
    plan: IterationPlan
    prompts: Ints
    lengths: Ints
    responses: Responses
    training: Training
    accounts: dict[str, Account]
    began_s: float
    crew: CrewModel = field(init=False)
    members_at_end: int = 0
    next_s: float | None = None

    @property
    def is_generated(self) -> bool:
        """True if all responses have ended."""
        return self.crew.ended_s is not None

    @property
    def planned(self) -> dict[str, int]:
        """The number of members with work, by pool."""
        return dict(Counter(slot.pool for slot in self.plan.slots if slot.groups))

    @property
    def planned_crew(self) -> dict[str, int]:
        """`planned` without the trainer's engines."""
        return {pool: count for pool, count in self.planned.items() if pool != TRAIN_POOL}

    def waits(self, pools: Sequence[str], policy: Policy, alone_s: float, now_s: float) -> StepWaits:
        """The waits of the iteration; alone_s: second at which the trainer's engines were ready, for an empty crew."""
        training, ended_s = self.training, self._ended_s(now_s)
        first_s = self._first_s(pools, alone_s)
        return StepWaits(
            wait_train_s=training.wait_s,
            wait_remote_s=max(0.0, min(self.left_s(policy, now_s), training.ended_s) - ended_s),
            train_s=training.train_s - training.retrain_s,
            rollout_s=max(0.0, ended_s - first_s),
            members=sum(self._members(pools, first_s, now_s).values()),
            members_at_end=self.members_at_end,
            generated_s=training.generated_s,
            behind_s=max(0.0, training.ended_s - ended_s),
            publish_s=training.publish_s,
        )

    def concluded(
        self, pools: Sequence[str], waits: StepWaits, alone_s: float, trained_s: float, now_s: float
    ) -> SimulatedIteration:
        """The figures of the iteration, after closing its accounts; trained_s: end of the previous training."""
        training, crew, accounts = self.training, self.crew, self.accounts
        return SimulatedIteration(
            iteration=self.number,
            duration_s=now_s - trained_s,
            rollout_s=self._ended_s(now_s) - self.began_s,
            train_s=training.train_s,
            retrain_s=training.retrain_s,
            wait_train_s=waits.wait_train_s,
            wait_remote_s=waits.wait_remote_s,
            control_s=now_s - training.ended_s,
            seeding_s=training.seeding_s,
            members=self._members(pools, self._first_s(pools, alone_s), now_s),
            planned=self.planned,
            members_at_end=self.members_at_end,
            tool_s=self.responses.tool_s,
            tokens=sum(self.responses.length),
            tokens_decoded=sum(account.decoded for account in accounts.values()),
            tokens_regenerated=sum(account.wasted for account in accounts.values()),
            prefill_tokens=sum(life.prefill_tokens for account in accounts.values() for life in account.lives),
            moved=crew.moved,
            losses={name: account.losses for name, account in accounts.items()},
            seconds={name: dict(account.seconds) for name, account in accounts.items()},
            usd={name: account.usd() for name, account in accounts.items()},
            gpu_s=sum(account.machine_s * account.gpus for account in accounts.values()),
            decisions=self.plan.decisions,
        )

    def left_s(self, policy: Policy, now_s: float) -> float:
        """Second at which the crew left the iteration."""
        if self.next_s is not None:
            return max(self.next_s, self._ended_s(now_s)) if policy.crew == "standing" else self.next_s
        return self._ended_s(now_s) if policy.max_staleness else now_s

    def _ended_s(self, now_s: float) -> float:
        return now_s if self.crew.ended_s is None else self.crew.ended_s

    def _first_s(self, pools: Sequence[str], alone_s: float) -> float:
        """Second at which the first member had the weights."""
        lives = [life for name in pools for life in self.accounts[name].lives]
        return min((life.worked_s for life in lives if life.worked_s is not None), default=alone_s)

    def _members(self, pools: Sequence[str], first_s: float, now_s: float) -> dict[str, float]:
        ended_s = self._ended_s(now_s)
        return {name: mean_members(self.accounts[name].lives, first_s, ended_s) for name in pools}
