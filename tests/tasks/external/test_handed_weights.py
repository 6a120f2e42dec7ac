"""What an external trainer hands over becomes the tensors of a version, or one line says why not."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import Draft, digest_all, draft_set
from tasks.external.handed_weights import WeightsMisfit, handed_blocks
from tasks.learning.pretrained import ModelError
from tasks.sampling.engines.weight_tensors import as_block, as_torch

TENSORS = {
    "embed": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "norm": torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
}


def first(tensors=TENSORS) -> Manifest:
    blocks = {name: as_block(tensor) for name, tensor in tensors.items()}
    digests = digest_all(blocks)
    return draft_set({name: Draft.full(block, digests[name]) for name, block in blocks.items()}, {}).manifest


def values(blocks):
    return {name: as_torch(block).tolist() for name, block in blocks.items()}


EXPECTED = {name: tensor.tolist() for name, tensor in TENSORS.items()}


def test_torch_tensors_take_the_stored_dtype_and_memory_of_their_own():
    handed = {"embed": TENSORS["embed"].clone(), "norm": TENSORS["norm"].float()}
    blocks = handed_blocks(handed, first())
    handed["embed"].zero_()
    assert values(blocks) == EXPECTED
    assert [block.dtype for block in blocks.values()] == ["F32", "BF16"]


def test_arrays_are_taken_as_they_are():
    tensors = {"embed": TENSORS["embed"]}
    blocks = handed_blocks({"embed": TENSORS["embed"].T.contiguous().numpy().T}, first(tensors))
    assert values(blocks) == {"embed": EXPECTED["embed"]}


def test_a_folder_of_transformers_is_read(tmp_path):
    save_file(dict(TENSORS), tmp_path / "model.safetensors")
    assert values(handed_blocks(tmp_path, first())) == EXPECTED


def test_a_tied_head_is_left_out():
    assert values(handed_blocks({**TENSORS, "head": TENSORS["embed"]}, first())) == EXPECTED


def test_an_array_of_another_byte_order_has_the_same_values():
    tensors = {"embed": TENSORS["embed"]}
    assert values(handed_blocks({"embed": TENSORS["embed"].numpy().astype(">f4")}, first(tensors))) == {
        "embed": EXPECTED["embed"]
    }


@pytest.mark.parametrize("handed", [torch.nn.Linear(2, 2), iter(TENSORS.items()), list(TENSORS.items()), None])
def test_what_has_no_names_is_refused(handed):
    with pytest.raises(WeightsMisfit, match="allowed: a folder, or tensors by name"):
        handed_blocks(handed, first())


def test_a_folder_without_weights_is_not_called_the_policy(tmp_path):
    with pytest.raises(ModelError, match=r"^tensors: .* holds no \.safetensors file"):
        handed_blocks(tmp_path, first())


class _OfPart(torch.Tensor):
    """As torch's tensors of a sharded model: the shape is the whole's, and there are no values to read."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is torch.Tensor.numpy:
            raise RuntimeError(".numpy() is not supported for tensor subclasses.")
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"embed": None}, "'embed' is missing; allowed: all 2 tensors"),
        ({"embed": torch.zeros(3, 2)}, r"'embed' has shape \[3, 2\]; allowed: \[2, 3\]"),
        ({"head": torch.ones(2, 3)}, "'head' is no tensor of version 0"),
        ({"embed": torch.zeros(2, 3, dtype=torch.int32)}, "'embed' has dtype I32; allowed: F32"),
        ({"embed": np.zeros((2, 3))}, "'embed' has dtype float64; allowed: float32, because version 0 has F32"),
        ({"norm": np.zeros(2, np.float32)}, "'norm' has dtype float32; allowed: a torch tensor"),
        ({"embed": np.array([[0, 1, np.inf], [0, 0, 0]], np.float32)}, "'embed' has a value that is not finite"),
        ({"norm": torch.tensor([1.0, float("nan")])}, "'norm' has a value that is not finite; allowed: finite numbers"),
        ({"norm": as_block(torch.tensor([1.0, float("nan")]).bfloat16())}, "'norm' has a value that is not finite"),
        ({"norm": torch.tensor([1.0, 3.4e38])}, "'norm' has a value that is not finite"),
        ({"norm": TensorBlock("F16", (2,), bytes(4))}, "'norm' has dtype F16; allowed: BF16"),
        ({"norm": [1.0, 2.0]}, "'norm' is a list; allowed: a torch tensor or an array"),
        ({"embed": torch.zeros(2, 3, device="meta")}, "'embed' is a Tensor of torch.float32 on meta that cannot be"),
        ({"embed": torch.zeros(2, 3).to_sparse()}, "'embed' is a Tensor .* allowed: whole, dense tensors"),
        ({"embed": torch.zeros(2, 3, dtype=torch.complex64)}, "'embed' is a Tensor of torch.complex64"),
        ({"embed": _OfPart(torch.zeros(2, 3))}, "'embed' is a _OfPart .* such as full_tensor"),
        ({"head": 1.0}, "'head' is no tensor of version 0"),
    ],
)
def test_tensors_of_another_model_are_refused(changed, line):
    handed = {name: value for name, value in {**TENSORS, **changed}.items() if value is not None}
    with pytest.raises(WeightsMisfit, match=line):
        handed_blocks(handed, first())
