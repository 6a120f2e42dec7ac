import pytest
from transformers import AutoConfig, Llama4Config

from tasks.models.configuration import ModelConfigurationError, read_model_config
from tests.tasks.models.families import tiny_config


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("mixtral", {"router_jitter_noise": 0.5, "attention_dropout": 0.1}),
        ("phimoe", {"router_jitter_noise": 0.5, "input_jitter_noise": 0.5}),
        ("gpt2", {"resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1}),
    ],
)
def test_dropout_and_the_noise_of_routers_are_switched_off(tmp_path, model_type, changes):
    tiny_config(model_type, **changes).save_pretrained(tmp_path)
    given = AutoConfig.from_pretrained(str(tmp_path)).to_dict()
    assert given | changes == given
    assert read_model_config(tmp_path).to_dict() | dict.fromkeys(changes, 0.0) == read_model_config(tmp_path).to_dict()


def test_the_parts_of_a_configuration_count_too(tmp_path):
    Llama4Config(text_config={"router_jitter_noise": 0.5, "attention_dropout": 0.5}).save_pretrained(tmp_path)
    text = read_model_config(tmp_path).get_text_config()
    assert (text.router_jitter_noise, text.attention_dropout) == (0.0, 0.0)
    assert text._experts_implementation == "eager"


def test_what_is_no_noise_stays(tmp_path):
    tiny_config("mixtral").save_pretrained(tmp_path)
    given, found = AutoConfig.from_pretrained(str(tmp_path)).to_dict(), read_model_config(tmp_path).to_dict()
    changed = {name for name in given if given[name] != found[name]}
    assert changed <= {"router_jitter_noise", "attention_dropout"}


def test_a_directory_without_a_configuration_is_refused(tmp_path):
    with pytest.raises(ModelConfigurationError, match=r"holds no config\.json; allowed: a Hugging Face directory"):
        read_model_config(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(ModelConfigurationError, match=r"is not understood: .*abacus") as refused:
        read_model_config(tmp_path)
    assert "\n" not in str(refused.value)
