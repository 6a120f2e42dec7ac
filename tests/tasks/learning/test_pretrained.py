"""Model directories as users have them, and what is wrong with some."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tasks.learning.pretrained import (
    ModelError,
    check_model,
    read_tensors,
    stop_token_ids,
    tensor_headers,
    vocabulary_size,
    weight_files,
)
from tasks.sampling.engines.weight_tensors import as_torch
from tests.tiny_model import VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model

CONFIG = {"vocab_size": 7, "eos_token_id": 2}


def write(directory, *, config=CONFIG, **tensors):
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    for name, tensor in tensors.items():
        save_file({"weight": tensor}, directory / f"{name}.safetensors")
    return directory


def test_a_saved_model_is_read_as_it_is_stored(tmp_path):
    model = tiny_model(tiny_config()).to(torch.bfloat16)
    save_tiny_model(tmp_path, model)
    check_model(tmp_path)
    assert vocabulary_size(tmp_path) == VOCAB_SIZE
    assert stop_token_ids(tmp_path) == (2,)
    blocks = read_tensors(tmp_path)
    expected = dict(model.named_parameters())
    assert blocks.keys() == expected.keys()
    assert {block.dtype for block in blocks.values()} == {"BF16"}
    assert all(torch.equal(as_torch(blocks[name]), tensor) for name, tensor in expected.items())


def test_several_files_are_read_by_their_index_and_others_are_left_out(tmp_path):
    write(tmp_path)
    for number in (1, 2, 3):
        save_file({f"w{number}": torch.full((2,), float(number))}, tmp_path / f"model-{number}.safetensors")
    index = {"weight_map": {"w1": "model-1.safetensors", "w2": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert [file.name for file in weight_files(tmp_path)] == ["model-1.safetensors", "model-2.safetensors"]
    assert read_tensors(tmp_path).keys() == {"w1", "w2"}


def test_files_beside_those_that_transformers_reads_are_left_out(tmp_path):
    (tmp_path / "original").mkdir()
    write(tmp_path, model=torch.zeros(2), consolidated=torch.ones(3), adapter_model=torch.ones(4))
    save_file({"weight": torch.ones(5)}, tmp_path / "original" / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "consolidated.safetensors"}}')
    check_model(tmp_path)
    assert read_tensors(tmp_path)["weight"].shape == (2,)
    assert tensor_headers(tmp_path) == {"weight": ("F32", (2,))}


@pytest.mark.parametrize("name", ["consolidated", "adapter_model", "model-00001-of-00002"])
def test_files_that_transformers_does_not_read_are_no_model(tmp_path, name):
    write(tmp_path, **{name: torch.zeros(2)})
    with pytest.raises(
        ModelError, match=rf"holds {name}\.safetensors, but neither model\.safetensors nor .*\.index\.json"
    ):
        check_model(tmp_path)


@pytest.mark.parametrize("listed", ["model-2.safetensors", "../other.safetensors"])
def test_an_index_that_names_what_is_not_there_is_refused(tmp_path, listed):
    write(tmp_path, part=torch.zeros(2))
    (tmp_path.parent / "other.safetensors").write_bytes(b"not ours")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": listed}}))
    with pytest.raises(ModelError, match=r"index\.json names files that are not there: .*(model-2|other)\.safetensors"):
        check_model(tmp_path)


@pytest.mark.parametrize("suffix", ["bin", "pt"])
def test_a_pickle_is_never_read_and_the_way_out_is_told(tmp_path, suffix):
    write(tmp_path)
    (tmp_path / f"pytorch_model.{suffix}").write_bytes(b"\x80\x04")
    with pytest.raises(ModelError, match=rf"no \.safetensors file; pytorch_model\.{suffix} is a pickle.*convert it"):
        check_model(tmp_path)


def test_a_directory_that_is_none_or_has_no_model_is_named(tmp_path):
    with pytest.raises(ModelError, match=r"policy\.path: '.*nowhere' does not exist; allowed: a Hugging Face model"):
        check_model(tmp_path / "nowhere")
    with pytest.raises(ModelError, match=r"policy\.path: '.*' has no config\.json"):
        check_model(tmp_path)
    write(tmp_path)
    with pytest.raises(ModelError, match=r"policy\.path: '.*' holds no \.safetensors file$"):
        check_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"config\.json is not JSON"),
        ("{}", r"config\.json names no vocab_size"),
        ('{"vocab_size": "many"}', r"config\.json names no vocab_size"),
    ],
)
def test_a_configuration_that_says_too_little_is_named(tmp_path, text, message):
    write(tmp_path, model=torch.zeros(2))
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        check_model(tmp_path)


def test_the_vocabulary_may_stand_in_the_text_part(tmp_path):
    write(tmp_path, config={"text_config": {"vocab_size": 11}, "eos_token_id": 2}, model=torch.zeros(2))
    check_model(tmp_path)
    assert vocabulary_size(tmp_path) == 11


@pytest.mark.parametrize("cut", [1, 40, 10_000])
def test_a_truncated_file_is_named_and_gives_no_tensor(tmp_path, cut):
    write(tmp_path, model=torch.arange(3000.0))
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-cut])
    with pytest.raises(ModelError, match=r"model\.safetensors is not a whole safetensors file"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("name", "body"),
    [
        ("model.safetensors", ""),
        ("model.safetensors.index.json", "{"),
        ("model.safetensors.index.json", "{}"),
    ],
)
def test_an_unfinished_download_is_named(tmp_path, name, body):
    write(tmp_path, part=torch.zeros(2))
    (tmp_path / name).write_text(body)
    with pytest.raises(ModelError, match=name):
        read_tensors(tmp_path)


def test_a_tensor_in_two_files_is_refused(tmp_path):
    write(tmp_path, a=torch.zeros(2), b=torch.ones(2))
    index = {"weight_map": {"weight": "a.safetensors", "other": "b.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match="tensor 'weight' is in two files"):
        read_tensors(tmp_path)


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        (2, None, (2,)),
        ([4, 2], None, (2, 4)),
        (2, [9, 2], (2, 9)),
        (None, 5, (5,)),
        (0, None, (0,)),
    ],
)
def test_stop_tokens_are_those_of_both_files(tmp_path, config, generation, expected):
    write(tmp_path, config={"vocab_size": 10, "eos_token_id": config})
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    assert stop_token_ids(tmp_path) == expected


@pytest.mark.parametrize("value", [None, []])
def test_a_model_whose_responses_would_not_end_is_refused(tmp_path, value):
    write(tmp_path, config={"eos_token_id": value})
    with pytest.raises(ModelError, match="no eos_token_id"):
        stop_token_ids(tmp_path)
