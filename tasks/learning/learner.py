"""Learner: the models of a run with their optimizers, in the memory of the train task."""

from dataclasses import dataclass, field

from tasks.learning.critic import Critic
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.packing import is_packed
from tasks.learning.policy import Policy, Scores
from tasks.learning.ranks import Ranks


@dataclass(frozen=True)
class CriticLearner:
    """The critic, its optimizer, and the number of first iterations in which only the critic is trained."""

    critic: Critic
    optimizer: PolicyOptimizer
    warmup_iterations: int = 0


@dataclass(frozen=True)
class Learner:
    """The policy with its optimizer, the reference policy if there is a KL term, and PPO's critic.

    `ranks`: the ranks that train together; each has its part of every model.
    """

    policy: Policy
    optimizer: PolicyOptimizer
    reference: Scores | None
    critic: CriticLearner | None = None
    ranks: Ranks = field(default_factory=Ranks)

    @property
    def is_packed(self) -> bool:
        """Whether the passes of all models are without padding."""
        return is_packed(self.policy.module)
