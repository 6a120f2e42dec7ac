"""A draft model in vLLM: whole engines on its model runner V2, interpreted, against the torch engine without drafts."""

from dataclasses import replace

import pytest

from storage.records.records import SamplingParams
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines.testing import CONTEXT_LENGTH, EngineContract, assert_same, request, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_drafts import speculative_config
from tests import vllm_interpreted
from tests.tiny_model import save_tiny_model, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, EnginePool, vllm_tiny_config
from tests.vllm_interpreted import INTERPRETED

# vLLM and its libraries warn while they are imported, and leave sockets to the garbage collector.
pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of another test")
ROWS, DRAFTS = 8, 4
GREEDY = SamplingParams(max_completion_length=40, temperature=0.0)
KINDS = (
    GREEDY,
    SamplingParams(max_completion_length=40, stop_token_ids=(2, 11)),
    SamplingParams(max_completion_length=30, temperature=0.7, top_p=0.9, top_k=20),
    SamplingParams(max_completion_length=40, temperature=1.5),
)


def test_vllms_own_speculator_takes_the_folder_and_its_most_likely_tokens():
    wanted = SpeculationConfig(drafts="auto", source="draft_model", draft_model="/models/small")
    given = speculative_config(wanted)
    assert (given["method"], given["model"], given["draft_sample_method"]) == ("draft_model", "/models/small", "greedy")
    assert given["num_speculative_tokens"] == 8
    assert given["num_speculative_tokens_per_batch_size"][0] == (1, 17, 8)
    assert given["rejection_sample_method"] == "standard"


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.skipif(vllm_interpreted.MISSING, reason=vllm_interpreted.WHY_NOT)
@pytest.mark.timeout(3700)
def test_on_model_runner_v2(tmp_path):
    vllm_interpreted.run_interpreted(__file__, tmp_path, 3600)


def pool_with(folder, draft_model):
    save_tiny_model(folder / "draft", draft_model)
    (folder / "policy").mkdir()
    wanted = SpeculationConfig(drafts=DRAFTS, source="draft_model", draft_model=str(folder / "draft"))
    return EnginePool(folder / "policy", VllmConfig(process="same"), wanted)


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    """Engines whose draft model is the policy of version 0."""
    pool = pool_with(tmp_path_factory.mktemp("equal"), tiny_model(vllm_tiny_config()))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def small_pool(tmp_path_factory):
    """Engines whose draft model has other heads and layers than the policy. They end last, see EnginePool."""
    small = vllm_tiny_config(hidden_size=32, num_attention_heads=1, num_hidden_layers=1, intermediate_size=48)
    pool = pool_with(tmp_path_factory.mktemp("small"), tiny_model(small, seed=5))
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def wanted(tmp_path_factory):
    """What the torch engine draws without drafts."""
    folder, model = tmp_path_factory.mktemp("plain"), tiny_model(vllm_tiny_config())
    model.config.save_pretrained(folder)
    sizes = {"max_responses_in_flight": ROWS, "context_length": CONTEXT_LENGTH}
    engine = TorchEngine(folder, device="cpu", **sizes)
    engine.load_weights(0, weight_blocks(model))
    found = run(engine, asked())
    engine.close()
    return found


def asked():
    return [request(response, KINDS[response % len(KINDS)]) for response in range(ROWS)]


@interpreted
def test_every_kind_of_sampling_draws_what_it_draws_without_drafts(pool, wanted):
    engine = pool.take(ROWS)
    assert engine.name.endswith("in runner V2, drafts by draft_model")
    before = engine.draft_totals
    assert_same(run(engine, asked()), wanted)
    assert engine.draft_totals.since(before).accepted > 20
    pool.give_back(engine)


@interpreted
def test_an_equal_model_drafts_every_greedy_token_until_the_policy_has_moved_on(pool):
    """So the draft model has its own weights, and keeps them."""
    engine = pool.take(ROWS)
    items = [replace(item, sampling=GREEDY) for item in asked()]

    def tokens_per_step():
        before = engine.draft_totals
        run(engine, items)
        counts = engine.draft_totals.since(before)
        return counts.tokens / counts.steps

    assert tokens_per_step() > 0.8 * (1 + DRAFTS)
    engine.load_weights(1, weight_blocks(tiny_model(vllm_tiny_config(), seed=1)))
    assert tokens_per_step() < 0.5 * (1 + DRAFTS)
    engine.load_weights(2, weight_blocks(pool.model))
    assert tokens_per_step() > 0.8 * (1 + DRAFTS)
    pool.give_back(engine)


@interpreted
@pytest.mark.exhaustive
def test_a_smaller_model_of_other_sizes_drafts(small_pool, wanted):
    """The cache of drafts has other heads and layers than the policy's."""
    assert_same(run(small_pool.take(ROWS), asked()), wanted)


@interpreted
@pytest.mark.exhaustive
class TestContract(EngineContract):
    prefill_block = 32

    @pytest.fixture
    def engine_factory(self, pool):
        self.pool = pool
        return pool.take

    def release(self, engine):
        self.pool.give_back(engine)

    def weights(self, version):
        return weight_blocks(tiny_model(vllm_tiny_config(), seed=version))
