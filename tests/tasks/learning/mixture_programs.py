"""What ranks do with a mixture of experts: load stored experts by rows, take steps, publish under the stored names."""

import torch
from safetensors.torch import load_file

from storage.clock import SystemClock
from storage.records import layout
from storage.stores.local import LocalStore
from storage.weights import tensor_sets
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.critic import Critic
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.publication import published_blocks
from tasks.learning.restoring import StoredState
from tasks.sampling.engines.weight_tensors import as_block

PUBLISHED = "published/"


def mixture(directory, ranks, train, batch):
    """Log-probs, steps and values of the model in `directory`; what it publishes lies below PUBLISHED.

    train(policy, optimizer, ranks, steps) takes steps; log-probs and values are those of `batch`.
    """
    model = directory / "model"
    stored = load_file(model / "model.safetensors")
    store = LocalStore(directory / f"store{ranks.world_size}")
    if ranks.is_first:
        blocks = {name: as_block(tensor.bfloat16() if "norm" in name else tensor) for name, tensor in stored.items()}
        tensor_sets.publish(store, layout.weights(0), blocks, {})
    ranks.barrier()
    pretrained = StoredState(store, 0, SystemClock(), ranks).pretrained()
    config = TrainerConfig(device="cpu")
    policy = Policy(model, pretrained, config, ranks=ranks)
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=1e-3, eps=1e-4))
    found = {}
    with torch.no_grad():
        found["logprobs"] = policy.logprobs(batch, 1.0)[0].tolist()
    found["steps"] = train(policy, optimizer, ranks, range(2))
    found["local"] = sum(getattr(each, "_local_tensor", each).numel() for each in policy.parameters().values())
    blocks = published_blocks(store, policy, ranks)
    if ranks.is_first:
        tensor_sets.publish(store, PUBLISHED, blocks, {})
    critic = Critic.of_policy(model, pretrained, config, ranks=ranks)
    with torch.no_grad():
        for name, parameter in critic.parameters().items():
            if name.startswith("value_head"):
                parameter.fill_(1.0)
        found["values"] = critic.values(batch).tolist()
    return found
