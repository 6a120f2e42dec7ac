"""The batches on which the tests of several ranks train, and steps over them."""

import torch

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.learning.batching import collate, dealt_passes, idle_batch
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.sharded import add_nothing
from tasks.learning.step import accumulate
from tests.tasks.learning.tiny_model import VOCABULARY

# A large eps: Adam's step is otherwise the sign of a gradient, also of one that is nothing but rounding.
OPTIMIZER = OptimizerConfig(learning_rate=1e-3, weight_decay=0.01, eps=1e-4)
ALGORITHM = AlgorithmConfig()
LENGTHS = ((3, 9), (1, 2), (5, 4), (2, 11), (6, 1))  # prompt and completion of five responses: not a multiple of 2
TOKENS_MAX = 24


def rows(step):
    generator = torch.Generator().manual_seed(step)
    draw = [
        torch.randint(0, VOCABULARY, (length,), generator=generator).tolist() for pair in LENGTHS for length in pair
    ]
    return draw[::2], draw[1::2]


def micro_batch(step, positions):
    prompts, completions = rows(step)
    return collate(
        positions,
        [prompts[i] for i in positions],
        [completions[i] for i in positions],
        [[-1.0] * len(completions[i]) for i in positions],
    )


def passes_of(ranks):
    return dealt_passes([sum(pair) for pair in LENGTHS], TOKENS_MAX, ranks.world_size)[ranks.rank]


def train(policy, optimizer, ranks, steps, algorithm=ALGORITHM):
    """Optimizer steps over all responses, each on one of the ranks; the loss and the gradient's norm of each."""
    measured = []
    for step in steps:
        loss = 0.0
        for positions in passes_of(ranks):
            if not positions:
                add_nothing(policy.logprobs(idle_batch(policy.device), 1.0)[0])
                continue
            advantages = torch.tensor([0.5 - (position % 3) for position in positions])
            batch = micro_batch(step, positions)
            loss += accumulate(policy, batch, advantages, algorithm, temperature=1.0, max_completion_length=12).loss
        tokens = float(sum(completion for _, completion in LENGTHS))
        outcome = optimizer.step(tokens)
        measured.append([ranks.all_sum([loss])[0] / tokens, outcome.grad_norm])
    return measured


def train_by_loss(policy_loss, policy, ranks):
    """Two steps of `train` by this policy loss, in which some ratios are clipped."""
    algorithm = AlgorithmConfig(policy_loss=policy_loss, old_logprobs="sampler")
    return train(policy, PolicyOptimizer(policy.parameters(), OPTIMIZER), ranks, range(2), algorithm)
