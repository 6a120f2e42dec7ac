"""One model on two ranks against the same model on one: losses, gradients, weights, checkpoints."""

import pytest
import torch

from storage.stores.local import LocalStore
from storage.weights.tensor_sets import read_manifest
from tasks.learning import checkpoint
from tasks.learning.ranks import Ranks
from tasks.learning.sharded import copy_stored, skeleton, whole
from tests.tasks.learning.rank_programs import everything, read_together, resumed, updated

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module")
def results(tmp_path_factory, ranks_server):
    """(directory, what one rank found, what each of two found)."""
    directory = tmp_path_factory.mktemp("sharded")
    alone = everything(directory, Ranks())
    alone["resumed"] = resumed(directory, Ranks(), "1/True/")
    alone["read"] = read_together(directory, Ranks(), "1/True/")
    return directory, alone, ranks_server.launch("everything", directory, 2)


@pytest.mark.parametrize(
    "what", ["logprobs True", "logprobs False", "steps True", "steps False", "packed", "refused", "reference", "values"]
)
def test_two_ranks_find_what_one_finds(results, what):
    _, alone, found = results
    for each in found:
        torch.testing.assert_close(torch.tensor(each[what]), torch.tensor(alone[what]), rtol=1e-5, atol=1e-5)


def test_a_users_own_loss_trains_as_the_built_in_one_on_one_rank_and_on_two(results):
    _, alone, found = results
    for each in (alone, *found):
        assert each["loss tests.own_losses:clipped"] == each["loss clip"]
        torch.testing.assert_close(torch.tensor(each["loss clip"]), torch.tensor(alone["loss clip"]), **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_the_same_weights_are_the_same_checkpoint_whoever_writes_it(results, tied):
    directory, alone, found = results
    store = LocalStore(directory / "store")
    one, two = (read_manifest(store, f"{ranks}/{tied}/0/") for ranks in (1, 2))
    assert one.tensors == two.tensors
    assert one.metadata["trainer_state"] == two.metadata["trainer_state"]
    assert [each[f"objects {tied}"] for each in found] == [alone[f"objects {tied}"]] * 2
    assert len(alone[f"objects {tied}"]) > 2
    assert checkpoint.read(store, f"2/{tied}/0/").state.optimizer_steps == 0


@pytest.mark.parametrize("tied", [True, False])
def test_weights_and_moments_are_equal_after_two_steps(results, tied):
    store = LocalStore(results[0] / "store")
    one, two = (checkpoint.read(store, f"{ranks}/{tied}/") for ranks in (1, 2))
    assert one.state == two.state
    assert list(one.parameters) == list(two.parameters)
    for mine, theirs in (
        (two.parameters, one.parameters),
        (two.moments["exp_avg"], one.moments["exp_avg"]),
        (two.moments["exp_avg_sq"], one.moments["exp_avg_sq"]),
    ):
        for name, tensor in theirs.items():
            torch.testing.assert_close(mine[name], tensor, **TOLERANCE)


def test_a_checkpoint_goes_on_with_another_number_of_ranks(results):
    directory, alone, found = results
    store = LocalStore(directory / "store")
    back = resumed(directory, Ranks(), "2/True/")
    for measured in (*(each["resumed"] for each in found), back):
        torch.testing.assert_close(torch.tensor(measured), torch.tensor(alone["resumed"]), **TOLERANCE)
    one, *others = (checkpoint.read(store, path) for path in ("1/True/then1/", "1/True/then2/", "2/True/then1/"))
    for other in others:
        assert other.state == one.state
        for name, tensor in one.parameters.items():
            torch.testing.assert_close(other.parameters[name], tensor, **TOLERANCE)


@pytest.mark.parametrize("name", ["adamw", "adamw_8bit", "muon"])
def test_an_optimizer_updates_to_the_same_bits_on_any_number_of_ranks(results, ranks_server, name):
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    directory, _, _ = results
    updated(directory, Ranks(), name, "none")
    ranks_server.launch(f"updated {name}", directory, 2)
    updated(directory, Ranks(), name, "optimizer", f"{name}/none/2/")
    store = LocalStore(directory / "store")
    gone_on = f"{name}/optimizer/{name}/none"
    for prefixes in ((f"{name}/none/1/", f"{name}/none/2/"), (f"{gone_on}/2/1/", f"{gone_on}/1/2/")):
        one, two = (read_manifest(store, prefix) for prefix in prefixes)
        assert one.tensors == two.tensors
        assert one.metadata["trainer_state"] == two.metadata["trainer_state"]
    assert one.metadata["trainer_state"]["optimizer_steps"] == 4


def test_ranks_read_a_checkpoint_once_together(results):
    directory, alone, found = results
    manifest = read_manifest(LocalStore(directory / "store"), "1/True/")
    stored = sum(entry.num_bytes for entry in manifest.tensors.values())
    assert [each["read"]["digests"] for each in found] == [alone["read"]["digests"]] * 2
    extra = alone["read"]["bytes"] - stored  # the manifest and the objects' headers
    assert sum(each["read"]["bytes"] for each in found) <= stored + 2 * extra
    assert max(each["read"]["bytes"] for each in found) < 0.8 * stored + extra
    assert alone["read"]["held"] == stored == sum(each["read"]["held"] for each in found)
    assert max(each["read"]["held"] for each in found) < 0.6 * stored


def test_bfloat16_keeps_float32_parameters_in_parts(results):
    _, alone, found = results
    for each in found:
        assert each["dtypes"] == ["torch.float32"]
        assert each["adapted dtypes"] == alone["adapted dtypes"] == {"torch.bfloat16": False, "torch.float32": True}
        for what in ("bfloat16", "values bfloat16", "adapted", "adapted published"):
            torch.testing.assert_close(torch.tensor(each[what]), torch.tensor(alone[what]), rtol=2e-3, atol=2e-3)
    assert sum(each["local"] for each in found) == alone["local"]
    assert max(each["local"] for each in found) < 0.6 * alone["local"]


@pytest.mark.parametrize("what", ["packed", "refused"])
def test_packed_passes_train_what_padded_ones_train(results, what):
    _, alone, _ = results
    torch.testing.assert_close(torch.tensor(alone[what]), torch.tensor(alone["steps True"]), **TOLERANCE)


def test_one_rank_has_whole_tensors(tmp_path):
    with skeleton(Ranks()):
        layer = torch.nn.Linear(3, 2)
    assert not layer.weight.is_meta
    with torch.no_grad():
        copy_stored(layer.weight, torch.ones(2, 3))
    assert whole(layer.weight) is layer.weight
    assert layer.weight.sum() == 6
