"""Drafts by a model, drawn with the policy's noise: which of them are right, and that no token depends on them."""

import weakref
from dataclasses import replace
from itertools import count

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import RolloutConfig, SpeculationConfig
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.engines.drafter import Computes
from tasks.sampling.engines.engine import EngineDied, EngineError, FinishReason
from tasks.sampling.engines.model_drafter import ModelDrafter
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.testing import (
    CONTEXT_LENGTH,
    STOPS,
    EngineContract,
    Result,
    assert_same,
    drain,
    request,
    resumed,
    run,
)
from tasks.sampling.engines.torch_engine import TorchEngine
from tests.distilled_models import distilled, prompts_of, taught
from tests.tiny_model import VOCAB_SIZE, save_tiny_model, tiny_config, tiny_model, weight_blocks

ROWS, DRAFTS = 8, 4
HALF = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}


def engine_of(folder, model, *, rows=ROWS, speculation=None):
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    sizes = {"max_responses_in_flight": rows, "context_length": CONTEXT_LENGTH}
    engine = TorchEngine(folder, device="cpu", speculation=speculation, **sizes)
    engine.load_weights(0, weight_blocks(model))
    return engine


def drafter_of(folder, model, *, rows=ROWS, **given):
    engine = engine_of(folder, model, rows=rows)
    return ModelDrafter(engine, weights=lambda: weight_blocks(model), vocab_size=model.config.vocab_size, **given)


def mixed_requests():
    """Requests that end by a stop token, by their length and by the context, sampled in three ways."""
    samplings = (
        SamplingParams(max_completion_length=CONTEXT_LENGTH),
        SamplingParams(max_completion_length=60, stop_token_ids=STOPS, temperature=0.7, top_p=0.9, top_k=20),
        SamplingParams(max_completion_length=33, temperature=0.0),
        SamplingParams(max_completion_length=70, stop_token_ids=tuple(range(3, VOCAB_SIZE, 12))),
    )
    return [replace(request(response), sampling=samplings[response % 4]) for response in range(ROWS)]


@pytest.fixture(scope="module")
def policy():
    return tiny_model(tiny_config())


@pytest.fixture(scope="module")
def wanted(tmp_path_factory, policy):
    """Plain decoding's answer to `mixed_requests`."""
    return run(engine_of(tmp_path_factory.mktemp("plain"), policy), mixed_requests())


def near(policy, noise):
    """A model whose weights differ a little from the policy's."""
    model = tiny_model(tiny_config())
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * noise)
    return model


@pytest.mark.parametrize("drafts", [1, 3, 8])
def test_an_equal_model_drafts_every_token_with_the_same_noise(tmp_path, policy, wanted, drafts):
    drafter = drafter_of(tmp_path / "draft", policy)
    assert isinstance(drafter, Computes)
    speculation = Speculation(drafter, drafts)
    engine = engine_of(tmp_path / "policy", policy, speculation=speculation)
    assert_same(run(engine, mixed_requests()), wanted)
    assert {result.finish_reason for result in wanted.values()} == set(FinishReason)
    counts = speculation.totals
    assert counts.accepted == counts.drafted > 100
    # A draft may be a response's last token.
    assert 0 <= counts.accepted + counts.steps - counts.tokens <= ROWS
    # Rows keep what was computed: of each response the tokens of its last drafts, and no prompt again.
    computed = drafter._engine.prefill_tokens - engine.prefill_tokens
    assert computed <= sum(len(result.token_ids) for result in wanted.values()) / (1 + drafts) + ROWS


def test_the_most_likely_tokens_of_an_equal_model_are_right_less_often(tmp_path, policy, wanted):
    speculation = Speculation(drafter_of(tmp_path / "draft", policy, keyed=False), DRAFTS)
    assert_same(run(engine_of(tmp_path / "policy", policy, speculation=speculation), mixed_requests()), wanted)
    # With the noise all are right. A quarter of the rows has no noise.
    assert 0 < speculation.totals.accepted < 0.8 * speculation.totals.drafted


@pytest.mark.parametrize("model", ["near", "another", "half", "fewer tokens"])
@pytest.mark.parametrize("drafts", [DRAFTS, "auto"])
def test_any_model_changes_no_token(tmp_path, policy, wanted, model, drafts):
    made = {
        "near": lambda: near(policy, 0.02),
        "another": lambda: tiny_model(tiny_config(), seed=9),
        "half": lambda: tiny_model(tiny_config(**HALF), seed=5),
        "fewer tokens": lambda: tiny_model(tiny_config(vocab_size=60), seed=5),
    }[model]()
    speculation = Speculation(drafter_of(tmp_path / "draft", made), drafts)
    engine = engine_of(tmp_path / "policy", policy, speculation=speculation)
    for _ in range(2):
        assert_same(run(engine, mixed_requests()), wanted)
    if drafts == DRAFTS:
        counts = speculation.totals
        # Tiny models with random weights mostly repeat the last token, whatever the weights.
        least, most = {"near": (0.3, 0.95)}.get(model, (0.0, 0.5))
        assert least <= counts.accepted / max(1, counts.drafted) < most


def test_a_response_with_a_token_that_the_model_does_not_know_gets_no_drafts(tmp_path, policy):
    drafter = drafter_of(tmp_path / "draft", tiny_model(tiny_config(vocab_size=60)))
    known, unknown = replace(request(0), prompt_ids=(5, 59)), replace(request(1), prompt_ids=(5, 60))
    drafter.start([known, unknown], [[5, 59], [5, 60]])
    assert [len(drafts) for drafts in drafter.draft([1, 0], 3)] == [0, 3]
    assert drafter.draft([1], 3) == [[]]


def test_after_a_breakdown_in_the_middle_the_model_drafts_again(tmp_path, policy, monkeypatch):
    drafter = drafter_of(tmp_path / "draft", policy)
    items = mixed_requests()
    drafter.start(items, [list(item.prompt_ids) for item in items])
    wanted = drafter.draft(range(ROWS), 5)
    with monkeypatch.context() as context:
        context.setattr(drafter._engine, "step", lambda: 1 // 0)
        with pytest.raises(ZeroDivisionError):
            drafter.draft(range(ROWS), 5)
    assert drafter.draft(range(ROWS), 5) == wanted


def test_out_of_memory_while_the_draft_models_cache_grows_is_mended_by_a_restart(tmp_path, policy, wanted, monkeypatch):
    """Half of the layers have grown then."""
    drafter = drafter_of(tmp_path / "draft", policy)
    speculation = Speculation(drafter, DRAFTS)
    engine = engine_of(tmp_path / "policy", policy, speculation=speculation)
    grow, grown = torch.nn.functional.pad, count(1)

    def no_memory_for_the_second_layer(*given):
        if next(grown) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return grow(*given)

    with monkeypatch.context() as context:
        context.setattr(torch.nn.functional, "pad", no_memory_for_the_second_layer)
        with pytest.raises(EngineDied):
            run(engine, mixed_requests())
    assert len({keys.shape[2] for keys, _ in drafter._engine._cache._layers.values()}) == 2
    engine.restart()
    assert drafter._engine._cache._layers == {}
    engine.load_weights(0, weight_blocks(policy))
    before = speculation.totals
    assert_same(run(engine, mixed_requests()), wanted)
    counts = speculation.totals.since(before)
    assert counts.accepted == counts.drafted > 100


def test_an_error_of_the_draft_model_names_the_draft_model(tmp_path, policy):
    broken = tiny_model(tiny_config())
    with torch.no_grad():
        next(broken.parameters()).fill_(torch.nan)
    speculation = Speculation(drafter_of(tmp_path / "draft", broken), DRAFTS)
    engine = engine_of(tmp_path / "policy", policy, speculation=speculation)
    engine.start(mixed_requests())
    with pytest.raises(EngineError, match=r"^rollout\.speculation\.draft_model: response 0: log-prob nan at token 0"):
        engine.step()


def test_a_closed_engine_holds_no_draft_model(tmp_path, policy):
    drafter = drafter_of(tmp_path / "draft", policy)
    engine = engine_of(tmp_path / "policy", policy, speculation=Speculation(drafter, DRAFTS))
    engine.start(mixed_requests())
    engine.step()
    held = weakref.ref(drafter)
    del drafter
    engine.close()
    assert held() is None


@pytest.mark.slow
def test_responses_move_between_engines_with_other_drafters_after_every_few_steps(tmp_path, policy):
    sampling = SamplingParams(max_completion_length=48, stop_token_ids=STOPS)
    items = [replace(request(response), sampling=sampling) for response in range(32)]
    whole = run(engine_of(tmp_path / "plain", policy, rows=32), items)
    drafters = (
        (drafter_of(tmp_path / "equal", policy, rows=32), 8),
        (SuffixDrafter(rows=32, context_length=CONTEXT_LENGTH), 4),
        (drafter_of(tmp_path / "another", tiny_model(tiny_config(), seed=9), rows=32), 2),
        (drafter_of(tmp_path / "near", near(policy, 0.02), rows=32), 3),
    )
    engines = [
        engine_of(tmp_path / f"policy{number}", policy, rows=32, speculation=Speculation(*given))
        for number, given in enumerate(drafters)
    ]
    results = {item.response: Result() for item in items}
    for turn in count():
        waiting = [item for item in items if results[item.response].finish_reason is None]
        if not waiting:
            break
        batch = [resumed(item, results[item.response].token_ids) for item in waiting]
        engine = engines[turn % 4]
        engine.start(batch)
        drain(engine, results, max_steps=2)
        engine.abort([item.response for item in batch])
    assert_same(results, whole)
    assert engines[0]._speculation.totals.accepted > 200


class _Contract(EngineContract):
    drafts: int | str = DRAFTS

    @pytest.fixture
    def engine_factory(self, tmp_path, policy):
        made = count()

        def make(rows):
            drafter = drafter_of(tmp_path / f"draft{next(made)}", self.model(policy), rows=rows)
            return engine_of(tmp_path / "policy", policy, rows=rows, speculation=Speculation(drafter, self.drafts))

        return make

    def model(self, policy):
        return policy

    def weights(self, version):
        return weight_blocks(tiny_model(tiny_config(), seed=version))


@pytest.mark.slow
class TestEqualModel(_Contract):
    pass


@pytest.mark.exhaustive
class TestNearModelChoosing(_Contract):
    drafts = "auto"

    def model(self, policy):
        return near(policy, 0.02)


@pytest.mark.exhaustive
class TestAnotherModel(_Contract):
    drafts = 8

    def model(self, policy):
        return tiny_model(tiny_config(**HALF), seed=9)


def test_a_folder_in_the_settings_makes_a_drafting_engine(tmp_path, policy, wanted):
    save_tiny_model(tmp_path / "draft", policy)
    policy.config.save_pretrained(tmp_path)
    speculation = SpeculationConfig(drafts=DRAFTS, source="draft_model", draft_model=str(tmp_path / "draft"))
    config = RolloutConfig(engine="torch", device="cpu", context_length=CONTEXT_LENGTH, speculation=speculation)
    engine = build_engine(config, tmp_path, VOCAB_SIZE)
    engine.load_weights(0, weight_blocks(policy))
    assert_same(run(engine, mixed_requests()), wanted)
    assert engine.draft_totals.accepted == engine.draft_totals.drafted > 100


@pytest.mark.slow
def test_a_distilled_half_size_model_is_right_more_often_with_the_policys_noise(tmp_path):
    """The figures are in docs/guide/engines.md."""
    policy = taught(tiny_config())
    draft = distilled(policy, tiny_config(**HALF))
    items = [
        replace(request(response), prompt_ids=prompt, sampling=SamplingParams(max_completion_length=32))
        for response, prompt in enumerate(prompts_of(64))
    ]
    wanted, shares = run(engine_of(tmp_path / "plain", policy, rows=64), items), {}
    for keyed in (True, False):
        drafter = drafter_of(tmp_path / "draft", draft, rows=64, keyed=keyed)
        speculation = Speculation(drafter, 1)
        engine = engine_of(tmp_path / "policy", policy, rows=64, speculation=speculation)
        assert_same(run(engine, items), wanted)
        shares[keyed] = speculation.totals.accepted / speculation.totals.drafted
    assert shares[True] > shares[False] + 0.2, shares
