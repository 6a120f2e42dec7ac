"""What publication measures of what it writes."""

from storage.clock import ManualClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import WRITE_S, read_manifest
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.checkpoint import TrainerState
from tasks.learning.critic import Critic
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.publication import save
from tasks.learning.ranks import Ranks

CREATE_S = 10.0


class Slow(MemoryStore):
    """A store in which each new object takes CREATE_S."""

    def __init__(self, clock):
        super().__init__()
        self._clock = clock

    def create(self, key, body):
        self._clock.advance(CREATE_S)
        return super().create(key, body)


def test_the_time_of_writing_a_state_includes_the_critic(model, build):
    """So a trainer that weighs writing against replaying counts both."""
    clock, policy, critic = ManualClock(), build(), Critic.of_policy(*model, TrainerConfig(device="cpu"))
    optimizer, of_critic = (PolicyOptimizer(each.parameters(), OptimizerConfig()) for each in (policy, critic))
    learner, store = Learner(policy, optimizer, None, CriticLearner(critic, of_critic, 0), Ranks()), Slow(clock)
    assert save(store, 1, learner, TrainerState.capture(1, optimizer), clock) is None
    alone_s, both_s = (
        read_manifest(store, prefix(1)).metadata[WRITE_S] for prefix in (layout.critic_checkpoint, layout.checkpoint)
    )
    # Each is one object and, when that time is known, a manifest.
    assert (alone_s, both_s) == (CREATE_S, 3 * CREATE_S)
