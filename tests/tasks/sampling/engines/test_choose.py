import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import RolloutConfig, SpeculationConfig, VllmConfig
from tasks.sampling.engines.choose import best_engine, build_engine, context_length
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.engines.testing import request, run
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.vllm_names import installed_version
from tests.tiny_model import VOCAB_SIZE, tiny_config, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config

needs_vllm = pytest.mark.skipif(MISSING, reason=WHY_NOT)
# vLLM and its libraries warn while they are imported.
imports_vllm = pytest.mark.filterwarnings("default")


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


def test_drafts_are_made_as_configured(tmp_path):
    """The second response to a prompt equals the first, so siblings draft all of it."""
    model = tiny_model(tiny_config())
    model.config.save_pretrained(tmp_path)
    first, steps, found = request(0, SamplingParams(max_completion_length=30)), {}, []
    for source in ("siblings", "ngram"):
        speculation = SpeculationConfig(drafts=4, source=source)
        engine = build_engine(RolloutConfig(engine="torch", device="cpu", speculation=speculation), tmp_path, 96)
        engine.load_weights(0, weight_blocks(model))
        found += [run(engine, [replace(first, response=response)])[response] for response in (0, 1)]
        steps[source] = engine._speculation.totals.steps
    assert len({tuple(result.token_ids) for result in found}) == 1
    assert steps["siblings"] < steps["ngram"] - 5


def test_without_drafts_the_torch_engine_has_no_drafter(model_dir):
    assert build_engine(RolloutConfig(engine="torch", device="cpu"), model_dir, 96)._speculation is None


def test_it_says_what_was_chosen(model_dir, caplog):
    with caplog.at_level("INFO"):
        build_engine(RolloutConfig(engine="auto", device="cpu"), model_dir, 96)
    reason = "vLLM is not installed" if MISSING else "rollout.device is cpu"
    assert f"engine auto: torch float32 cpu; {reason}" in caplog.text


@pytest.mark.skipif(not MISSING, reason="vLLM is installed")
def test_without_vllm_auto_is_torch_and_vllm_is_refused_in_words(model_dir):
    assert best_engine(RolloutConfig()) == ("torch", "vLLM is not installed")
    with pytest.raises(EngineError, match=r"rollout\.engine: vLLM is not installed; see docs/guide/first_run\.md"):
        build_engine(RolloutConfig(engine="vllm"), model_dir, 96)


@needs_vllm
@imports_vllm
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_with_vllm_and_without_a_gpu_auto_is_torch():
    assert best_engine(RolloutConfig()) == ("torch", f"vLLM {installed_version()} finds no GPU here")


@needs_vllm
@imports_vllm
def test_vllm_is_made_as_configured(tmp_path, caplog):
    vllm_tiny_config().save_pretrained(tmp_path)
    config = RolloutConfig(engine="vllm", max_responses_in_flight=7, vllm=VllmConfig(process="same"))
    with caplog.at_level("INFO"):
        engine = build_engine(config, tmp_path, VOCAB_SIZE)
    try:
        assert isinstance(engine, VllmEngine)
        assert engine.name == f"vllm {installed_version()} float32 cpu, keyed sampling in runner V1"
        assert engine.max_responses_in_flight == 7
        assert engine.batch_invariant
        assert f"engine vllm: {engine.name}; as configured" in caplog.text
    finally:
        engine.close()


def test_a_dtype_that_rounds_makes_no_promise(model_dir):
    engine = build_engine(RolloutConfig(engine="torch", dtype="bfloat16", device="cpu"), model_dir, 96)
    assert engine.name == "torch bfloat16 cpu"
    assert not engine.batch_invariant


def test_the_choice_alone_imports_neither_torch_nor_vllm():
    code = (
        "import sys, tasks.sampling.engines.choose; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "[]\n"


def test_an_engine_that_nobody_knows_is_refused_with_those_that_are_known(tmp_path):
    with pytest.raises(EngineError, match=r"'sglang' is not known; allowed: auto, torch, vllm, scripted"):
        build_engine(RolloutConfig(engine="sglang"), tmp_path, 96)


def test_the_scripted_engine_needs_neither_a_model_nor_torch(tmp_path):
    config = RolloutConfig(engine="scripted", max_responses_in_flight=3)
    engine = build_engine(config, tmp_path / "none", 50)
    assert isinstance(engine, ScriptedEngine)
    assert engine.max_responses_in_flight == 3
    code = (
        "import sys; from pathlib import Path; from tasks.sampling.engines.choose import build_engine;"
        "from tasks.configuration.rollout import RolloutConfig;"
        "build_engine(RolloutConfig(engine='scripted'), Path('none'), 50); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
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


@pytest.mark.parametrize("name", ["max_position_embeddings", "n_positions", "max_seq_len", "seq_length"])
def test_the_models_own_context_is_read_by_each_of_its_names(tmp_path, name):
    (tmp_path / "config.json").write_text(f'{{"{name}": 100}}')
    assert context_length(RolloutConfig(), tmp_path) == 100
    with pytest.raises(EngineError, match=r"rollout\.context_length: 101 given; allowed: up to the model's own 100"):
        context_length(RolloutConfig(context_length=101), tmp_path)
