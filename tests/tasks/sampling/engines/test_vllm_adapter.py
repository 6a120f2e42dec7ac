"""Adapters that vLLM adds to its products itself, against the torch engine with the merged weights."""

import pytest
import torch

from storage.weights.adapters import Adapter, AdapterRecord
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.adapted_weights import AdaptedWeights
from tasks.sampling.engines.adapter_merge import merged_blocks
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.testing import CONTEXT_LENGTH, request, resumed, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block
from tests.tiny_model import tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, EnginePool, vllm_tiny_config

pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
RANK, ALPHA = 3, 6.0
ITEMS = [request(response) for response in range(8)]


class Versions:
    """Adapters of one model; counts how often version 0 is read."""

    def __init__(self, model):
        self.base = weight_blocks(model)
        self.reads = 0

    def read(self):
        self.reads += 1
        return self.base

    def adapted(self, version, names=None, record=None):
        random = torch.Generator().manual_seed(version)
        layers = {}
        for name in names or [name.removesuffix(".weight") for name in self.base if name.endswith("proj.weight")]:
            outputs, inputs = self.base[f"{name}.weight"].shape if f"{name}.weight" in self.base else (64, 64)
            first, second = torch.randn(RANK, inputs, generator=random), torch.randn(outputs, RANK, generator=random)
            layers[name] = (as_block(first * 0.3), as_block(second * 0.3))
        return AdaptedWeights(Adapter(record=record or AdapterRecord(rank=RANK, alpha=ALPHA), layers=layers), self.read)

    def same(self, engine, torch_engine, version, weights):
        """VLLM's results, whose tokens are torch's with merged weights, and within 1e-3 the log-probs."""
        engine.load_weights(version, weights)
        whole = merged_blocks(self.base, weights.adapter) if isinstance(weights, AdaptedWeights) else weights
        torch_engine.load_weights(version, whole)
        found, wanted = run(engine, ITEMS), run(torch_engine, ITEMS)
        for response, result in found.items():
            assert result.token_ids == wanted[response].token_ids
            assert result.logprobs == pytest.approx(wanted[response].logprobs, abs=1e-3)
        return found


@pytest.fixture(scope="module", params=["same", "own"])
def pool(request, tmp_path_factory):
    settings = VllmConfig(process=request.param, max_lora_rank=8)
    pool = EnginePool(tmp_path_factory.mktemp("adapters"), settings)
    yield pool
    pool.close()


@pytest.fixture
def engine(pool):
    engine = pool.take(8)
    yield engine
    pool.give_back(engine)


@pytest.fixture
def torch_engine(pool, tmp_path):
    pool.model.config.save_pretrained(tmp_path)
    engine = TorchEngine(
        tmp_path, dtype="float32", device="cpu", max_responses_in_flight=8, context_length=CONTEXT_LENGTH
    )
    yield engine
    engine.close()


def test_tokens_are_those_of_merged_weights_and_version_0_is_loaded_once(pool, engine, torch_engine):
    versions = Versions(pool.model)
    engine.load_weights(1, weight_blocks(tiny_model(vllm_tiny_config(), seed=5)))
    found = [versions.same(engine, torch_engine, version, versions.adapted(version)) for version in (1, 2)]
    assert versions.reads == 1
    for response in found[0]:
        assert found[0][response].token_ids != found[1][response].token_ids
    cut = [
        resumed(item, found[1][item.response].token_ids[:5])
        for item in ITEMS
        if len(found[1][item.response].token_ids) > 5
    ]
    assert cut
    for response, rest in run(engine, cut).items():
        assert rest.token_ids == found[1][response].token_ids[5:]
        assert list(rest.logprobs) == list(found[1][response].logprobs[5:])


def test_whole_weights_take_the_place_of_an_adapter(pool, engine, torch_engine):
    versions = Versions(pool.model)
    engine.load_weights(0, versions.base)
    versions.same(engine, torch_engine, 1, versions.adapted(1))
    versions.same(engine, torch_engine, 0, versions.base)
    versions.same(engine, torch_engine, 1, versions.adapted(1))
    assert versions.reads == 0  # version 0 was there


def test_what_vllm_cannot_adapt_is_refused_and_the_weights_stay(pool, engine):
    versions = Versions(pool.model)
    engine.load_weights(0, versions.base)
    before = run(engine, ITEMS)
    with pytest.raises(EngineError, match=r"adapter of rank 9; allowed by rollout\.vllm\.max_lora_rank: 8"):
        engine.load_weights(1, versions.adapted(1, record=AdapterRecord(rank=9, alpha=1.0)))
    name = "model.layers.0.mlp.up_proj"
    record = AdapterRecord(rank=RANK, alpha=1.0, transposed=(name,))
    with pytest.raises(EngineError, match=r"'model\.layers\.0\.mlp\.up_proj' is a Conv1D"):
        engine.load_weights(1, versions.adapted(1, names=[name], record=record))
    assert run(engine, ITEMS) == before


def test_a_layer_that_vllm_would_leave_out_ends_it_and_a_restart_loads_version_0_again(pool, engine, torch_engine):
    versions = Versions(pool.model)
    engine.load_weights(0, versions.base)
    with pytest.raises(EngineDied, match="failed"):
        engine.load_weights(1, versions.adapted(1, names=["model.layers.9.self_attn.q_proj"]))
    engine.restart()
    versions.same(engine, torch_engine, 1, versions.adapted(1))
    assert versions.reads == 1
