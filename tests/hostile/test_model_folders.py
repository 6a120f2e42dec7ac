"""Model folders that some program, or half a download, has left behind: each is refused in one line by its name.

To add a case, add a line to REFUSED: the file, its text (or a change of its JSON), and what the message says.
"""

import json
import shutil

import pytest
from click.testing import CliRunner

from gleaner import main
from resources.model_config import ModelConfigError, model_fields
from storage.clock import ManualClock
from tasks.learning.pretrained import ModelError
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.engine import EngineError
from tests.small_run import config, document, memory_store
from tests.tiny_model import VOCAB_SIZE

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
OBJECT = "allowed: a JSON object"
REFUSED = [
    (CONFIG, "[]", OBJECT),
    (CONFIG, "7", OBJECT),
    (CONFIG, "null", OBJECT),
    (CONFIG, '"text"', OBJECT),
    (CONFIG, "", "is not JSON"),
    (CONFIG, "{", "is not JSON"),
    (CONFIG, "[" * 5000, "is not JSON"),
    (CONFIG, b"\xff\xfe", "is not JSON"),
    (CONFIG, '{"vocab_size": ' + "9" * 5000 + "}", "is not JSON"),
    (CONFIG, {"text_config": None}, "text_config is null; allowed: a JSON object"),
    (CONFIG, {"text_config": []}, "text_config is []"),
    (CONFIG, {"text_config": "x"}, 'text_config is "x"'),
    *((CONFIG, {"vocab_size": value}, "names no vocab_size") for value in (-1, 0, True, 1.5, "9", [9], None, 1 << 40)),
    *((CONFIG, {"eos_token_id": value}, "eos_token_id is ") for value in (1.5, ["a", 1], "2", True, [None], -1, {})),
    *((CONFIG, {"eos_token_id": value}, "no eos_token_id") for value in (None, [])),
    *((CONFIG, {"max_position_embeddings": value}, "no max_position") for value in (None, -1, 0, True, 1.5, "9", [])),
    ("generation_config.json", "[]", OBJECT),
    ("generation_config.json", "{", "is not JSON"),
    ("generation_config.json", {"eos_token_id": 1.5}, "eos_token_id is 1.5"),
    (INDEX, "[]", OBJECT),
    (INDEX, "{", "is not JSON"),
    (INDEX, "{}", "is not an index of safetensors files"),
    (INDEX, {"weight_map": 7}, "is not an index"),
    (INDEX, {"weight_map": {"w": 7}}, "is not an index"),
    (INDEX, {"weight_map": {"w": None, "v": "x"}}, "is not an index"),
    (INDEX, {"weight_map": {"w": ["x"]}}, "is not an index"),
    (INDEX, {"weight_map": {"w": "nul\0"}}, "names files that are not there"),
    (INDEX, {"weight_map": {"w": "../model.safetensors"}}, "names files that are not there"),
    ("model.safetensors", "x", "is not a whole safetensors file"),
    (INDEX, {"weight_map": {"w": "consolidated/w.safetensors"}}, "names files that are not there"),
    ("tokenizer.json", "[]", "no usable tokenizer"),
    ("tokenizer.json", "{", "no usable tokenizer"),
    ("tokenizer_config.json", "[]", "no usable tokenizer"),
    ("two words.json", "{}", "not a storage key"),
]
ERRORS = (ModelError, EngineError, ValueError)


def damaged(model, folder, name, change):
    """A copy of the model with one file replaced, or with other fields in its JSON (in both configurations)."""
    shutil.copytree(model, folder)
    if name == INDEX:
        # A file of this name is read whatever an index says.
        (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    if not isinstance(change, dict):
        (folder / name).write_bytes(change if isinstance(change, bytes) else change.encode())
        return folder
    other = folder / "generation_config.json"
    if name == CONFIG and other.exists():
        other.unlink()
    before = json.loads((folder / name).read_text()) if (folder / name).exists() else {}
    (folder / name).write_text(json.dumps(before | change))
    return folder


@pytest.mark.parametrize(("name", "change", "message"), REFUSED)
def test_check_and_plan_refuse_it_in_one_line(model, tmp_path, name, change, message):
    settings = config("memory://folders", damaged(model, tmp_path / "model", name, change))
    store = memory_store("folders")
    with pytest.raises(ERRORS) as checked:
        check_files(settings)
    assert message in str(checked.value)
    assert "\n" not in str(checked.value)
    assert len(str(checked.value)) < 600
    with pytest.raises(type(checked.value)) as planned:
        prepare(settings, "test", ManualClock())
    assert str(planned.value) == str(checked.value)
    assert store.list("") == []


@pytest.mark.parametrize("path", ["~nosuchuser/model", "x" * 300, "y/" * 3000])
def test_a_path_that_leads_nowhere_is_refused(path):
    with pytest.raises(ModelError, match=r"^policy\.path: ") as caught:
        check_files(config("memory://folders", path))
    assert "\n" not in str(caught.value)


def test_the_text_part_of_a_model_of_several_parts_counts(tmp_path):
    (tmp_path / CONFIG).write_text(
        json.dumps({"vocab_size": 3, "text_config": {"vocab_size": 5, "eos_token_id": None}})
    )
    assert model_fields(tmp_path) == {"vocab_size": 5, "text_config": {"vocab_size": 5, "eos_token_id": None}}
    with pytest.raises(ModelConfigError, match="cannot be read: No such file"):
        model_fields(tmp_path, "none.json")


def test_a_chat_without_a_template_is_refused_by_check_as_by_plan(model, tmp_path):
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1"}]}) + "\n")
    settings = config("memory://folders", model, data={"source": str(rows)})
    with pytest.raises(ValueError, match=r"^policy\.path: the tokenizer has no chat template, and prompt"):
        check_files(settings)


@pytest.mark.parametrize("body", ["[]", "7", "null", '{"text_config": null}', '{"vocab_size": -1}'])
def test_a_forecast_refuses_it_too(model, tmp_path, body):
    folder = damaged(model, tmp_path / "model", CONFIG, body)
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps(document(str(tmp_path / "run"), folder)))
    result = CliRunner().invoke(main, ["forecast", str(file)], catch_exceptions=False)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("gleaner: ")


def test_the_tiny_model_itself_is_accepted(model):
    seen = check_files(config("memory://folders", model))
    told = ["model", "model check", "advantage estimator", "policy loss", "rewards", "prompts", "stop tokens"]
    assert [line.partition(":")[0] for line in seen] == told
    assert model_fields(model)["vocab_size"] == VOCAB_SIZE
