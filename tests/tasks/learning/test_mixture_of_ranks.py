"""A mixture of experts on two ranks against the same on one: its experts are stored one by one."""

import pytest
import torch

from storage.records import layout
from storage.stores.local import LocalStore
from storage.weights.tensor_sets import pull, read_manifest
from tasks.learning.ranks import Ranks
from tasks.sampling.engines.weight_tensors import as_torch
from tests.tasks.learning.mixture_programs import PUBLISHED, mixture
from tests.tasks.learning.rank_programs import micro_batch, train
from tests.tasks.models.families import write_family

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def results(tmp_path_factory, ranks_server):
    """(directory, what one rank found, what each of two found)."""
    directory = tmp_path_factory.mktemp("mixture")
    write_family(directory / "model", "mixtral")
    alone = mixture(directory, Ranks(), train, micro_batch(0, [0, 1]))
    return directory, alone, ranks_server.launch("mixture", directory, 2)


@pytest.mark.parametrize("what", ["logprobs", "steps", "values"])
def test_two_ranks_find_what_one_finds(results, what):
    _, alone, found = results
    for each in found:
        torch.testing.assert_close(torch.tensor(each[what]), torch.tensor(alone[what]), rtol=1e-5, atol=1e-5)
    assert sum(each["local"] for each in found) == alone["local"]


def test_both_publish_the_same_under_the_names_of_the_first_weights(results):
    stores = [LocalStore(results[0] / f"store{count}") for count in (1, 2)]
    first = read_manifest(stores[0], layout.weights(0)).tensors
    described = {name: (entry.dtype, entry.shape) for name, entry in first.items()}
    assert sum(".experts." in name for name in described) == 24
    published = [pull(store, PUBLISHED)[1] for store in stores]
    for blocks in published:
        assert {name: (block.dtype, block.shape) for name, block in blocks.items()} == described
    for name, block in published[0].items():
        torch.testing.assert_close(as_torch(published[1][name]), as_torch(block), rtol=1e-2, atol=1e-5)
