import json
import subprocess
import sys

import pytest

from tasks.sampling.choose import build_engine, context_length
from tasks.sampling.config import RolloutConfig
from tasks.sampling.engine import EngineError
from tasks.sampling.scripted_engine import ScriptedEngine
from tests.tiny_model import tiny_config


@pytest.fixture
def model_dir(tmp_path):
    tiny_config().save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("name", ["auto", "torch"])
def test_the_torch_engine_is_made_as_configured(model_dir, name):
    engine = build_engine(RolloutConfig(engine=name, device="cpu", max_responses_in_flight=7), model_dir, 96)
    assert engine.name == "torch float32 cpu"
    assert engine.max_responses_in_flight == 7
    assert engine.batch_invariant


def test_it_says_what_was_chosen(model_dir, caplog):
    with caplog.at_level("INFO"):
        build_engine(RolloutConfig(engine="auto", device="cpu"), model_dir, 96)
    assert "engine auto: torch float32 cpu" in caplog.text


def test_a_dtype_that_rounds_makes_no_promise(model_dir):
    engine = build_engine(RolloutConfig(engine="torch", dtype="bfloat16", device="cpu"), model_dir, 96)
    assert engine.name == "torch bfloat16 cpu"
    assert not engine.batch_invariant


def test_the_scripted_engine_needs_neither_a_model_nor_torch(tmp_path):
    config = RolloutConfig(engine="scripted", max_responses_in_flight=3)
    engine = build_engine(config, tmp_path / "none", 50)
    assert isinstance(engine, ScriptedEngine)
    assert engine.max_responses_in_flight == 3
    code = (
        "import sys; from pathlib import Path; from tasks.sampling.choose import build_engine;"
        "from tasks.sampling.config import RolloutConfig;"
        "build_engine(RolloutConfig(engine='scripted'), Path('none'), 50); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout == "False\n"


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"max_position_embeddings": 128}, 128),
        ({"text_config": {"max_position_embeddings": 64}}, 64),
        ({"max_position_embeddings": None, "text_config": {"max_position_embeddings": 32}}, 32),
    ],
)
def test_the_context_is_the_models_own(tmp_path, config, expected):
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert context_length(RolloutConfig(), tmp_path) == expected
    assert context_length(RolloutConfig(context_length=20), tmp_path) == 20


@pytest.mark.parametrize("config", [{}, {"max_position_embeddings": "long"}, {"text_config": {}}])
def test_a_model_that_does_not_say_needs_it_said(tmp_path, config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match=r"no max_position_embeddings; set rollout\.context_length"):
        context_length(RolloutConfig(), tmp_path)
    assert context_length(RolloutConfig(context_length=20), tmp_path) == 20


def test_a_context_longer_than_the_models_own_is_refused(model_dir):
    """The model's own is 256."""
    with pytest.raises(EngineError, match=r"rollout\.context_length: 257 given; allowed: up to the model's own 256"):
        context_length(RolloutConfig(context_length=257), model_dir)
    with pytest.raises(EngineError, match="257"):
        build_engine(RolloutConfig(engine="torch", device="cpu", context_length=257), model_dir, 96)
    build_engine(RolloutConfig(engine="torch", device="cpu", context_length=256), model_dir, 96)
