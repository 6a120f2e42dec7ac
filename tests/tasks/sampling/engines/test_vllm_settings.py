"""What vLLM is told: its environment, its configuration, and the size of its cache on a CPU."""

import json
import math
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.paths import is_own_folder
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines import vllm_settings
from tasks.sampling.engines.vllm_names import resolve
from tasks.sampling.engines.vllm_settings import CPU_BLOCK_SIZE, build_vllm_config, cpu_cache_bytes, prepare_environment
from tests.foreign_files import NO_FOLDER, in_time
from tests.vllm_engines import MISSING, WHY_NOT, vllm_tiny_config

# vLLM and its libraries warn while they are imported.
pytestmark = pytest.mark.filterwarnings("default")
needs_vllm = pytest.mark.skipif(MISSING, reason=WHY_NOT)
GIB = 1 << 30
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
READ_BY_VLLM = ("VLLM_", "TORCHDYNAMO_DISABLE")
CACHES = ("VLLM_CACHE_ROOT", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "FLASHINFER_WORKSPACE_BASE")
ANYWHERE = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_ENGINE_READY_TIMEOUT_S": "13",
    "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "8",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
}
ON_A_CPU = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}


def environment_after(process, users, shown=READ_BY_VLLM, **given):
    """What a new process has in its environment for vLLM, and the device that it was told."""
    code = (
        "import json, os; from tasks.configuration.rollout import VllmConfig;"
        "from tasks.sampling.engines.vllm_settings import Limits, prepare_environment;"
        f"config = VllmConfig(process={process!r}, **{given!r});"
        "device = prepare_environment(config, Limits(start_s=12.5, step_s=8.0));"
        "print(json.dumps([device, dict(os.environ)]))"
    )
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(READ_BY_VLLM + CACHES)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600, env=inherited | users)
    device, environment = json.loads(done.stdout.splitlines()[-1])
    return device, {name: value for name, value in environment.items() if name.startswith(shown)}


@needs_vllm
def test_environment_of_an_engine_in_a_process_of_its_own():
    device, environment = environment_after("own", {})
    assert device
    assert environment.pop("VLLM_BATCH_INVARIANT", "1") == "1"
    assert Path(environment.pop("VLLM_RPC_BASE_PATH")).name.startswith("gleaner-vllm-")
    assert environment == ANYWHERE | (ON_A_CPU if device == "cpu" else {})


@needs_vllm
def test_compiled_code_is_kept_below_the_directory_that_is_named(tmp_path):
    users = {"TRITON_CACHE_DIR": "/elsewhere"}
    _, caches = environment_after("own", users, CACHES, cache_dir=str(tmp_path))
    assert caches == {
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "inductor"),
        "TRITON_CACHE_DIR": "/elsewhere",
        "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "flashinfer"),
    }


@pytest.mark.parametrize("what", [*NO_FOLDER, "nothing", "our own folder"])
def test_code_that_torch_compiles_is_never_in_a_folder_that_another_user_may_write_to(tmp_path, monkeypatch, what):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    place = tmp_path / f"gleaner-inductor-{os.geteuid()}"
    make = {"our own folder": lambda path: path.mkdir(mode=0o755), "nothing": lambda _: None}
    (NO_FOLDER | make)[what](place)
    found = in_time(vllm_settings._inductor_folder)
    assert (found == place) == (what in make)
    assert is_own_folder(found)
    vllm_settings._sockets().cleanup()
    vllm_settings._sockets.cache_clear()


@pytest.mark.parametrize("named", [None, "eth7"])
def test_what_an_engine_starts_listens_on_the_loopback_and_what_follows_where_it_was_told(monkeypatch, named):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    if named is not None:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    with vllm_settings.on_loopback():
        assert os.environ["GLOO_SOCKET_IFNAME"] == os.environ["NCCL_SOCKET_IFNAME"] == "lo"
    assert os.environ.get("GLOO_SOCKET_IFNAME") == named
    assert "NCCL_SOCKET_IFNAME" not in os.environ


@needs_vllm
def test_what_the_user_has_set_stays_except_where_the_engine_runs():
    users = {
        "VLLM_NO_USAGE_STATS": "0",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_ENGINE_READY_TIMEOUT_S": "77",
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "78",
        "VLLM_WORKER_MULTIPROC_METHOD": "fork",
        "VLLM_USE_FLASHINFER_SAMPLER": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0-1",
        "TORCHDYNAMO_DISABLE": "0",
        "VLLM_BATCH_INVARIANT": "0",
        "VLLM_RPC_BASE_PATH": "/sockets",
    }
    _, environment = environment_after("same", users)
    assert environment == users | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


@given(
    heads=st.integers(1, 64),
    key_value_heads=st.none() | st.integers(1, 64),
    head_dim=st.none() | st.sampled_from([32, 64, 128]),
    layers=st.integers(1, 80),
    nested=st.booleans(),
    dtype=st.sampled_from(sorted(BYTES)),
    rows=st.integers(1, 2048),
    context_length=st.integers(2, 32_768),
)
def test_a_cpu_has_cache_for_all_responses_and_never_more_than_4_gib(
    tmp_path_factory, heads, key_value_heads, head_dim, layers, nested, dtype, rows, context_length
):
    fields = {
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "num_hidden_layers": layers,
        "hidden_size": heads * 64,
        "head_dim": head_dim,
    }
    model_dir = tmp_path_factory.getbasetemp()
    (model_dir / "config.json").write_text(json.dumps({"text_config": fields} if nested else fields))
    per_token = 2 * layers * (key_value_heads or heads) * (head_dim or 64) * BYTES[dtype]
    needed = rows * math.ceil(context_length / CPU_BLOCK_SIZE) * CPU_BLOCK_SIZE * per_token
    found = cpu_cache_bytes(model_dir, dtype, rows, context_length)
    assert min(needed, 4 * GIB) <= found <= 4 * GIB
    assert found <= max(needed + 8 * CPU_BLOCK_SIZE * per_token, 8 << 20)


@pytest.fixture
def model_dir(tmp_path):
    vllm_tiny_config().save_pretrained(tmp_path)
    return tmp_path


def built(model_dir, *, keyed=True, rows=7, **given):
    config = VllmConfig(**({"process": "same"} | given))
    prepare_environment(config)
    return build_vllm_config(
        config,
        SpeculationConfig(),
        model_dir,
        dtype="bfloat16",
        max_responses_in_flight=rows,
        context_length=160,
        architecture="Qwen2ForCausalLM",
        on_cpu=True,
        keyed=keyed,
    )


@needs_vllm
def test_what_we_are_told_arrives_at_vllm(model_dir):
    settings = built(
        model_dir,
        gpu_memory_utilization=0.5,
        kv_cache_memory_bytes=64 << 20,
        enforce_eager=True,
    )
    model, cache, scheduler = settings.model_config, settings.cache_config, settings.scheduler_config
    assert str(model.dtype) == "torch.bfloat16"
    assert (model.model, model.max_model_len, model.enforce_eager) == (str(model_dir), 160, True)
    assert model.architectures == ["Qwen2ForCausalLM"]
    assert (model.skip_tokenizer_init, model.trust_remote_code) == (True, False)
    assert (cache.kv_cache_memory_bytes, cache.gpu_memory_utilization) == (64 << 20, 0.5)
    assert cache.enable_prefix_caching
    assert scheduler.max_num_seqs == 7
    assert settings.load_config.load_format == "dummy"
    assert settings.parallel_config.tensor_parallel_size == 1
    assert settings.parallel_config.worker_extension_cls == "tasks.sampling.engines.vllm_worker.WorkerExtension"


@needs_vllm
def test_defaults_on_a_cpu_are_an_eager_engine_with_cache_for_all_responses(model_dir):
    settings = built(model_dir)
    assert settings.model_config.enforce_eager
    assert settings.cache_config.block_size == CPU_BLOCK_SIZE
    assert settings.cache_config.kv_cache_memory_bytes == cpu_cache_bytes(model_dir, "bfloat16", 7, 160)
    assert settings.parallel_config.distributed_executor_backend == "uni"


@needs_vllm
def test_a_forward_pass_takes_as_many_tokens_as_vllms_own_class_for_generation_in_bulk(model_dir):
    prepare_environment(VllmConfig(process="same"))
    given = {"model": str(model_dir), "skip_tokenizer_init": True, "max_model_len": 160, "max_num_seqs": 128}
    given |= {"hf_overrides": {"architectures": ["Qwen2ForCausalLM"]}}
    # An EngineArgs keeps what it chose, so each gives one configuration.
    in_bulk = resolve("EngineArgs")(**given).create_engine_config(resolve("UsageContext").LLM_CLASS)
    without_context = resolve("EngineArgs")(**given).create_engine_config()
    bulk = in_bulk.scheduler_config.max_num_batched_tokens
    assert bulk > without_context.scheduler_config.max_num_batched_tokens
    assert built(model_dir, rows=128).scheduler_config.max_num_batched_tokens == bulk


@needs_vllm
def test_keyed_sampling_is_a_processor_of_the_runner_and_the_number_it_leaves(model_dir):
    model = built(model_dir).model_config
    assert model.logits_processors == ["tasks.sampling.engines.vllm_sampler:KeyedBatchRows"]
    assert model.logprobs_mode == "processed_logits"
    assert model.seed == 0


@needs_vllm
def test_sampling_without_keys_has_another_seed_every_time(model_dir):
    models = [built(model_dir, keyed=False).model_config for _ in range(2)]
    assert [model.logits_processors for model in models] == [None, None]
    assert [model.logprobs_mode for model in models] == ["raw_logprobs", "raw_logprobs"]
    assert models[0].seed != models[1].seed


@needs_vllm
@pytest.mark.parametrize("named", [True, False])
def test_a_model_is_taken_for_what_it_says_it_is_or_else_for_what_we_say(model_dir, named):
    """Its config.json says llama's class; we say qwen2's."""
    content = json.loads((model_dir / "config.json").read_text())
    content["architectures"] = ["LlamaForCausalLM"] if named else None
    (model_dir / "config.json").write_text(json.dumps(content))
    assert built(model_dir).model_config.architectures == ["LlamaForCausalLM" if named else "Qwen2ForCausalLM"]
