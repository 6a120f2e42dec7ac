import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tasks.grading.reward import GradingError, RewardOutcome
from tasks.grading.reward_model import RewardModel, RewardModelSettings, batches_by_length, unused_token
from tests.tasks.grading.tiny_reward_model import TEMPLATE, case, plain_score, save_reward_model
from tests.tiny_model import CHARACTERS

COMPLETIONS = ("2", "11, or so they say", "", "two", "a" * 60, "3", "#9")
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_reward_model(tmp_path_factory.mktemp("reward"))


def opened(folder: Path, **changes: Any) -> RewardModel:
    fields = {"label": None, "device": "cpu", "dtype": "float32"}
    return RewardModel(RewardModelSettings(name="judge", folder=str(folder), **(fields | changes)))


def limited(folder: Path, place: Path, tokens: int) -> Path:
    """A copy whose tokenizer has this limit."""
    return altered(folder, place / "limited", "tokenizer_config.json", model_max_length=tokens)


def scores(model: RewardModel, cases: Sequence[Any]) -> list[Any]:
    model.load()
    return model.score(cases)


@pytest.mark.slow
@pytest.mark.parametrize("tokens_max", [1, 70, 16_384])
def test_scores_are_those_of_a_plain_forward_pass_however_they_are_batched(folder: Path, tokens_max: int):
    found = scores(opened(folder, batch_tokens_max=tokens_max), [case(k, text) for k, text in enumerate(COMPLETIONS)])
    wanted = [plain_score(folder, "1+1=" + text) for text in COMPLETIONS]
    assert found == pytest.approx(wanted, abs=1e-5)
    assert max(wanted) - min(wanted) > 0.1


@pytest.mark.slow
def test_an_encoder_and_one_of_several_labels(tmp_path: Path):
    folder = save_reward_model(tmp_path / "bert", "bert", num_labels=3)
    cases = [case(k, text) for k, text in enumerate(COMPLETIONS)]
    found = scores(opened(folder, label=2), cases)
    assert found == pytest.approx([plain_score(folder, "1+1=" + text, 2) for text in COMPLETIONS], abs=1e-5)


def test_messages_go_through_the_models_own_template(tmp_path: Path):
    folder = save_reward_model(tmp_path / "reward", template=TEMPLATE)
    [found] = scores(opened(folder), [case(0, "2", CHAT)])
    text = "<|system|>be brief\n<|user|>1+1\n<|assistant|>2\n"
    assert found == pytest.approx(plain_score(folder, text), abs=1e-5)


def test_without_a_template_messages_are_lines(folder: Path):
    [found] = scores(opened(folder), [case(0, "2", CHAT)])
    assert found == pytest.approx(plain_score(folder, "be brief\n1+1\n2"), abs=1e-5)


def test_a_template_that_refuses_is_an_error_of_that_response(tmp_path: Path):
    folder = save_reward_model(tmp_path / "reward", template="{{ raise_exception('no system role') }}")
    refused, fine = scores(opened(folder), [case(0, "2", CHAT), case(1, "2")])
    assert refused.error.startswith("cannot be put into the reward model's tokens: ")
    assert "no system role" in refused.error
    assert fine == pytest.approx(plain_score(folder, "1+1=2"), abs=1e-5)


def test_nothing_is_cut(folder: Path, tmp_path: Path):
    cases = [case(0, "1234"), case(1, "12345"), case(2, "", "")]
    found = scores(opened(limited(folder, tmp_path, 8)), cases)
    assert found[0] == pytest.approx(plain_score(folder, "1+1=1234"), abs=1e-5)
    assert found[1] == RewardOutcome(None, "has 9 tokens for its reward model; allowed: 8")
    assert found[2] == RewardOutcome(None, "has no tokens for its reward model")
    found = scores(opened(folder), [case(0, "1" * 252), case(1, "1" * 253)])
    assert isinstance(found[0], float)
    assert found[1].error == "has 257 tokens for its reward model; allowed: 256"


def test_half_precision_is_near(folder: Path):
    [found] = scores(opened(folder, dtype="bfloat16"), [case(0, "two")])
    wanted = plain_score(folder, "1+1=two")
    assert found != wanted
    assert found == pytest.approx(wanted, abs=0.2)


def test_no_case_is_no_score(folder: Path):
    assert scores(opened(folder), []) == []


def altered(folder: Path, target: Path, name: str, **fields: Any) -> Path:
    """A copy of a model's folder in which fields of one JSON file are others; None removes a field."""
    target.mkdir()
    for file in folder.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    document = json.loads((target / name).read_text()) | fields
    (target / name).write_text(json.dumps({key: value for key, value in document.items() if value is not None}))
    return target


BROKEN_FILES = {
    "broken tokenizer": ("tokenizer.json", "{"),
    "unknown": ("config.json", '{"model_type": "abacus"}'),
    "no classifier": (
        "config.json",
        '{"model_type": "vits", "num_labels": 1, "pad_token_id": 0, "max_position_embeddings": 9}',
    ),
    "adapter": ("adapter_config.json", '{"peft_type": "LORA", "base_model_name_or_path": "/elsewhere"}'),
    "no object": ("config.json", "["),
    "index": ("model.safetensors.index.json", '{"weight_map": {"a": "model-2.safetensors"}}'),
}


OTHER_FIELDS: dict[str, dict[str, Any]] = {
    "two labels": {"id2label": {"0": "a", "1": "b"}, "label2id": {"a": 0, "b": 1}},
    "other weights": {"transformers_weights": "other.bin"},
    "quantized": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}},
    "attention": {"_attn_implementation": "someone/attention"},
    "inner attention": {"text_config": {"attn_implementation": {"": "someone/attention"}}},
    "experts": {"experts_implementation": "someone/experts"},
}


def damaged(folder: Path, target: Path, kind: str) -> Path:
    copy = altered(folder, target, "config.json", **OTHER_FIELDS.get(kind, {}))
    if kind in OTHER_FIELDS:
        return copy
    weights = copy / "model.safetensors"
    match kind:
        case "no model":
            return target / "nowhere"
        case "no configuration":
            (copy / "config.json").unlink()
        case "pickle":
            weights.rename(copy / "pytorch_model.bin")
        case "cut":
            weights.write_bytes(weights.read_bytes()[:-10])
        case "no tokenizer":
            (copy / "tokenizer.json").unlink()
        case "no head":
            tensors = {name: tensor for name, tensor in load_file(weights).items() if not name.startswith("score")}
            save_file(tensors, weights, {"format": "pt"})
        case "head alone":
            save_file({"score.weight": load_file(weights)["score.weight"]}, weights, {"format": "pt"})
        case _:
            if kind == "index":
                # A file of this name is read whatever an index says.
                weights.rename(copy / "model-1.safetensors")
            file, text = BROKEN_FILES[kind]
            (copy / file).write_text(text)
    return copy


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("no model", "nowhere' does not exist; allowed: a Hugging Face directory with a sequence classification"),
        ("no configuration", "has no config.json; allowed: "),
        ("pickle", "holds no .safetensors file, and pickles are never read; allowed: "),
        ("cut", "holds model.safetensors, which is not a whole safetensors file: "),
        ("index", "lacks the file model-2.safetensors of its model.safetensors.index.json"),
        ("no tokenizer", "has no tokenizer: none of tokenizer.json, "),
        ("broken tokenizer", "holds no usable tokenizer: "),
        ("unknown", "holds no usable configuration: ValueError: "),
        ("no classifier", "is no sequence classification model: ValueError: "),
        ("no head", "lacks the weights score.weight, with which it would give a reward"),
        ("head alone", "lacks all weights whose names begin with 'model.'; allowed: "),
        ("two labels", "holds score.weight of shape [1, 32]; its config.json asks for [2, 32]; allowed: "),
        ("adapter", "has an adapter_config.json: merge the adapter into its model, and remove that file; allowed: "),
        ("no object", "has an unreadable config.json: JSONDecodeError: "),
        ("other weights", "has transformers_weights in its config.json: 'other.bin'; allowed: "),
        ("quantized", "has quantized weights that cannot be read here: ImportError: Loading a GPTQ quantized model "),
        ("attention", 'wants code from elsewhere in config.json: _attn_implementation is "someone/attention"'),
        ("inner attention", "wants code from elsewhere in config.json: attn_implementation is "),
        ("experts", 'wants code from elsewhere in config.json: experts_implementation is "someone/experts"'),
    ],
)
def test_a_folder_that_is_no_reward_model_is_refused(folder: Path, tmp_path: Path, kind: str, message: str):
    with pytest.raises(GradingError) as caught:
        opened(damaged(folder, tmp_path / "copy", kind), label=0)
    assert str(caught.value).startswith("reward 'judge': model: value '")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_model_that_names_no_padding_needs_none(tmp_path: Path):
    folder = save_reward_model(tmp_path / "reward", "llama")
    bare = altered(folder, tmp_path / "bare", "config.json", pad_token_id=None)
    barer = altered(bare, tmp_path / "barer", "tokenizer_config.json", pad_token=None)
    wanted = [plain_score(folder, "1+1=2"), plain_score(folder, "1+1=two")]
    for each in (bare, barer):
        assert scores(opened(each), [case(0, "2"), case(1, "two")]) == pytest.approx(wanted, abs=1e-5)
    beyond = altered(folder, tmp_path / "beyond", "config.json", pad_token_id=96)
    with pytest.raises(GradingError, match="pads with the token 96, which its 96 tokens lack; allowed: "):
        opened(beyond)


def test_an_input_may_end_with_the_tokenizers_padding(tmp_path: Path):
    """As where an end-of-text token is the padding, too, and the template ends every message with it."""
    template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    folder = save_reward_model(tmp_path / "reward", "llama", template=template)
    bare = altered(folder, tmp_path / "bare", "config.json", pad_token_id=None)
    bare = altered(bare, tmp_path / "barer", "tokenizer_config.json", pad_token="<eos>")
    chat = [{"role": "user", "content": "1+1"}]
    wanted = [plain_score(bare, f"1+1<eos>{text}<eos>") for text in ("2", "two", "22")]
    cases = [case(number, text, chat) for number, text in enumerate(("2", "two", "22"))]
    model = opened(bare)
    assert scores(model, cases) == pytest.approx(wanted, abs=1e-5)
    assert [model.score([each])[0] for each in cases] == pytest.approx(wanted, abs=1e-5)


def test_inputs_that_use_every_token_are_scored_one_by_one(tmp_path: Path):
    folder = save_reward_model(tmp_path / "reward", "llama", vocab_size=4 + len(CHARACTERS))
    bare = altered(folder, tmp_path / "bare", "config.json", pad_token_id=None)
    texts = (f"<pad><bos><eos><unk>{CHARACTERS}", "2")
    found = scores(opened(bare), [case(number, text) for number, text in enumerate(texts)])
    assert found == pytest.approx([plain_score(folder, f"1+1={text}") for text in texts], abs=1e-5)


@given(st.lists(st.lists(st.integers(0, 5), min_size=1), min_size=1))
def test_the_unused_token_is_in_no_input(inputs: list[list[int]]):
    used = {token for ids in inputs for token in ids}
    found = unused_token(inputs, 6)
    assert (found is None) == (len(used) == 6)
    assert found not in used


def test_a_model_that_looks_at_its_padding_scores_each_input_alone(tmp_path: Path):
    folder = save_reward_model(tmp_path / "reward", "fnet", type_vocab_size=1, num_labels=1)
    found = scores(opened(folder), [case(k, text) for k, text in enumerate(COMPLETIONS)])
    assert found == pytest.approx([plain_score(folder, "1+1=" + text) for text in COMPLETIONS], abs=1e-5)


def test_positions_that_begin_after_padding_are_fewer(tmp_path: Path):
    fields = {"pad_token_id": 1, "max_position_embeddings": 66, "type_vocab_size": 1}
    folder = save_reward_model(tmp_path / "roberta", "roberta", **fields)
    fits, longer = scores(opened(folder), [case(0, "1" * 60), case(1, "1" * 61)])
    assert fits == pytest.approx(plain_score(folder, "1+1=" + "1" * 60), abs=1e-5)
    assert longer.error == "has 65 tokens for its reward model; allowed: 64"


def test_what_could_not_be_scored_whatever_the_answer_is_found_before(folder: Path, tmp_path: Path):
    brief = limited(folder, tmp_path, 5)
    opened(brief).check([case(0, "x")])
    with pytest.raises(GradingError) as caught:
        opened(brief).check([case(0, "x"), case(1, "x", "1+12=")])
    assert str(caught.value) == (
        "reward 'judge': the prompt \"1+12=\" with the answer 'x' has 6 tokens for its reward model; allowed: 5"
    )
    other = save_reward_model(tmp_path / "reward", template="{{ raise_exception('no system role') }}")
    with pytest.raises(
        GradingError, match=r"^reward 'judge': the prompt \[.*\] with the answer 'x' cannot be put into"
    ):
        opened(other).check([case(0, "x", CHAT)])


def test_a_token_that_the_model_lacks_is_an_error_of_its_response(tmp_path: Path):
    folder = save_reward_model(tmp_path / "reward", vocab_size=30)
    lacking, fine = scores(opened(folder), [case(0, "two"), case(1, "2")])
    assert lacking == RewardOutcome(None, "has the token 46, which its reward model lacks")
    assert isinstance(fine, float)


@pytest.mark.parametrize(
    ("num_labels", "label", "message"),
    [
        (1, 1, "label: value 1; allowed: 0 or null"),
        (3, None, "label: value null; allowed: 0 to 2, because the model has several labels"),
        (3, 3, "label: value 3; allowed: 0 to 2"),
    ],
)
def test_the_label_must_be_one_of_the_models(tmp_path: Path, num_labels: int, label: int | None, message: str):
    folder = save_reward_model(tmp_path / "reward", num_labels=num_labels)
    with pytest.raises(GradingError, match=f"^reward 'judge': {message}"):
        opened(folder, label=label)


def test_a_tokenizer_may_have_a_lower_limit_than_the_model(folder: Path, tmp_path: Path):
    found = scores(opened(limited(folder, tmp_path, 16)), [case(0, "1" * 13)])
    assert found[0].error == "has 17 tokens for its reward model; allowed: 16"


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_found_when_the_weights_are_loaded(folder: Path):
    model = opened(folder, device="cuda")
    with pytest.raises(GradingError, match=r"^reward 'judge': device: value 'cuda'; allowed: 'cpu' or 'auto' on a"):
        model.load()
    assert isinstance(scores(opened(folder, device="auto"), [case(0, "2")])[0], float)


def test_weights_that_are_missing_inside_the_model_are_found_when_they_are_loaded(folder: Path, tmp_path: Path):
    copy = altered(folder, tmp_path / "copy", "config.json")
    tensors = load_file(copy / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"]
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    with pytest.raises(GradingError, match=r"lacks the weights model\.layers\.1\.mlp\.up_proj\.weight; allowed: "):
        opened(copy).load()


@given(st.lists(st.integers(1, 50), max_size=30), st.integers(1, 120))
def test_batches_hold_every_place_once_and_no_more_than_is_allowed(lengths: list[int], tokens_max: int):
    found = batches_by_length(lengths, tokens_max)
    assert sorted(place for places in found for place in places) == list(range(len(lengths)))
    for places in found:
        padded = max(lengths[place] for place in places) * len(places)
        assert padded <= tokens_max or len(places) == 1
    padded = [lengths[place] for places in found for place in places]
    assert padded == sorted(lengths, reverse=True)
