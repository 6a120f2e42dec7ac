import pytest
import torch

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.policy import Policy
from tests.tasks.learning.launched_ranks import rank_server
from tests.tasks.learning.tiny_model import VOCABULARY, write_model
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model


@pytest.fixture(scope="session")
def ranks_server():
    """Where several ranks are forked."""
    with rank_server() as server:
        yield server


@pytest.fixture(scope="session")
def larger(tmp_path_factory):
    """The directory of a teacher of another width and depth than the small run's policy."""
    return save_tiny_model(tmp_path_factory.mktemp("teacher"), tiny_model(tiny_config(), seed=4))


@pytest.fixture
def model(tmp_path):
    """(directory, tensors) of a tied model."""
    return tmp_path, write_model(tmp_path)


@pytest.fixture
def build(model):
    """build(**TrainerConfig fields) -> a new Policy of the same weights."""

    def new(*, trainable=True, double=False, **fields):
        policy = Policy(*model, TrainerConfig(device="cpu", **fields), trainable=trainable)
        if double:
            policy.module.double()
        return policy

    return new


@pytest.fixture
def ragged():
    """ragged(responses, seed) -> rows for collate: ids, prompts, completions, log-probs, all of random lengths."""

    def make(count=6, seed=0):
        generator = torch.Generator().manual_seed(seed)

        def draw(low, high):
            length = int(torch.randint(low, high, (), generator=generator))
            return torch.randint(0, VOCABULARY, (length,), generator=generator).tolist()

        prompts = [draw(1, 7) for _ in range(count)]
        completions = [draw(1, 11) for _ in range(count)]
        logprobs = [(-torch.rand(len(row), generator=generator) * 4).tolist() for row in completions]
        return list(range(count)), prompts, completions, logprobs

    return make


@pytest.fixture
def batch(ragged):
    return collate(*ragged())
