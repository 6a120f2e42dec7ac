"""Learner: the models of a run with their optimizers, in the memory of the train task."""

from dataclasses import dataclass, field

from tasks.learning.critic import Critic
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.packing import is_packed
from tasks.learning.policy import Policy, Scores
from tasks.learning.ranks import Ranks
from tasks.learning.teachers import Teachers


@dataclass(frozen=True)
class CriticLearner:
    """PPO's critic with its optimizer.

    Attributes:
        critic: The value model.
        optimizer: The critic's own optimizer.
        warmup_iterations: First iterations in which only the critic is trained.
    """

    critic: Critic
    optimizer: PolicyOptimizer
    warmup_iterations: int = 0


@dataclass(frozen=True)
class Learner:
    """The models of a run with their optimizers, in the memory of a rank.

    Attributes:
        policy: The policy that is trained.
        optimizer: The policy's optimizer.
        reference: The reference policy; None without a KL term.
        critic: PPO's critic; None for estimators without a critic.
        ranks: The ranks that train together; each rank has its part of every model.
        teachers: The models that the policy learns from; None without the section `teacher`.
    """

    policy: Policy
    optimizer: PolicyOptimizer
    reference: Scores | None
    critic: CriticLearner | None = None
    ranks: Ranks = field(default_factory=Ranks)
    teachers: Teachers | None = None

    @property
    def is_packed(self) -> bool:
        """Whether the passes of all models are without padding."""
        return is_packed(self.policy.module)
