"""Learner: the models of a run with their optimizers, as the train task has them in memory."""

from dataclasses import dataclass, field

from tasks.learning.critic import Critic
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy, Scores
from tasks.learning.ranks import Ranks


@dataclass(frozen=True)
class CriticLearner:
    """The critic, its optimizer, and for how many iterations of the run it is trained alone."""

    critic: Critic
    optimizer: PolicyOptimizer
    warmup_iterations: int = 0


@dataclass(frozen=True)
class Learner:
    """What is trained: the policy with its optimizer; the reference policy where there is a KL term; PPO's critic.

    `ranks`: who trains together; each has its part of every model here.
    """

    policy: Policy
    optimizer: PolicyOptimizer
    reference: Scores | None
    critic: CriticLearner | None = None
    ranks: Ranks = field(default_factory=Ranks)
