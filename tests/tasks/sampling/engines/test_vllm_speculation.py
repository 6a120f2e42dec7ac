"""Drafts in vLLM: whole engines on its model runner V2, interpreted, against the torch engine without drafts."""

import random
from contextlib import ExitStack, closing
from dataclasses import replace

import pytest
import torch

from storage.records.records import SamplingParams
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines.engine import EngineError
from tasks.sampling.engines.testing import CONTEXT_LENGTH, assert_same, request, resumed, run
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_drafts import drafts_by_responses, speculative_config
from tasks.sampling.engines.vllm_engine import VllmEngine
from tests import vllm_interpreted
from tests.tiny_model import VOCAB_SIZE, tiny_model, weight_blocks
from tests.vllm_engines import MISSING, WHY_NOT, EnginePool, VllmContract, vllm_tiny_config
from tests.vllm_interpreted import INTERPRETED

# vLLM and its libraries warn while they are imported, and leave sockets to the garbage collector.
pytestmark = [pytest.mark.skipif(MISSING, reason=WHY_NOT), pytest.mark.filterwarnings("default")]
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of another test")
ROWS = 8
KINDS = (
    SamplingParams(max_completion_length=40, stop_token_ids=(2, 11)),
    SamplingParams(max_completion_length=30, temperature=0.7, top_p=0.9, top_k=20),
    SamplingParams(max_completion_length=60, temperature=0.0),
    SamplingParams(max_completion_length=7, temperature=1.3),
)


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.skipif(vllm_interpreted.MISSING, reason=vllm_interpreted.WHY_NOT)
@pytest.mark.timeout(3700)
def test_on_model_runner_v2(tmp_path):
    vllm_interpreted.run_interpreted(__file__, tmp_path, limit_s=3600)


@pytest.fixture(scope="module")
def model():
    return tiny_model(vllm_tiny_config())


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory, model):
    folder = tmp_path_factory.mktemp("model")
    model.config.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def pool(tmp_path_factory):
    speculation = SpeculationConfig(drafts=4, source="ngram")
    pool = EnginePool(tmp_path_factory.mktemp("same"), VllmConfig(process="same"), speculation)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def ends_last():
    """Closes engines when all tests have ended, see EnginePool."""
    with ExitStack() as engines:
        yield engines


@pytest.fixture(scope="module")
def asked():
    """Prompts that repeat themselves, so that drafts are found, and all kinds of sampling in one batch."""
    rnd = random.Random(7)
    found = []
    for response in range(ROWS):
        word = tuple(rnd.randrange(4, 12) for _ in range(3))
        found.append(replace(request(response, KINDS[response % len(KINDS)]), prompt_ids=word * 4))
    return found


@pytest.fixture(scope="module")
def plain(model, model_dir, asked):
    """What the torch engine draws without drafts."""
    engine = torch_engine(model_dir, model)
    found = run(engine, asked)
    engine.close()
    return found


def torch_engine(model_dir, model):
    engine = TorchEngine(
        model_dir, dtype="float32", device="cpu", max_responses_in_flight=ROWS, context_length=CONTEXT_LENGTH
    )
    engine.load_weights(0, weight_blocks(model))
    return engine


def vllm(model_dir, model, **speculation):
    engine = VllmEngine(
        model_dir,
        vocab_size=VOCAB_SIZE,
        dtype="float32",
        max_responses_in_flight=ROWS,
        context_length=CONTEXT_LENGTH,
        config=VllmConfig(process="same"),
        speculation=SpeculationConfig(**speculation),
    )
    engine.load_weights(0, weight_blocks(model))
    return engine


@pytest.fixture
def engine(pool):
    engine = pool.take(ROWS)
    yield engine
    pool.give_back(engine)


def deltas_of(engine, items, steps_max=1000):
    """What each of the engine's steps gives."""
    engine.start(items)
    found = []
    while len(found) < steps_max and (deltas := engine.step()):
        found.append(deltas)
    return found


def tokens_of(deltas, response):
    return [token for step in deltas for delta in step if delta.response == response for token in delta.token_ids]


@interpreted
def test_every_kind_of_sampling_draws_what_it_draws_without_drafts_in_fewer_steps(engine, asked, plain):
    assert engine.name.endswith("in runner V2, drafts by ngram")
    assert engine.batch_invariant
    steps = deltas_of(engine, asked)
    for item in asked:
        assert tokens_of(steps, item.response) == plain[item.response].token_ids
    assert len(steps) < 0.6 * max(len(result.token_ids) for result in plain.values())
    # Log-probs, too; the contract's own comparison reads them.
    assert_same(run(engine, asked), plain)


@interpreted
def test_drafts_are_counted_when_a_response_ends(engine, asked):
    before = engine.draft_totals
    deltas = [delta for step in deltas_of(engine, asked) for delta in step]
    counts = engine.draft_totals.since(before)
    assert counts.tokens == sum(len(delta.token_ids) for delta in deltas)
    assert counts.steps == len(deltas), "in this process every step gives a delta"
    assert counts.accepted == counts.tokens - len(deltas) > 100
    assert counts.drafted == 4 * (len(deltas) - len(asked)), "none in the steps that compute prompts"
    assert counts.saved_s is None
    deltas_of(engine, asked, steps_max=2)
    engine.abort([item.response for item in asked])
    assert engine.draft_totals.since(before) == counts


@interpreted
@pytest.mark.exhaustive
def test_a_stop_token_inside_drafts_ends_the_response_there(engine, asked, model, model_dir, monkeypatch):
    """Drafts are made right, because those that repeat a response hold no token that is new to it."""
    endless = [replace(item, sampling=replace(item.sampling, stop_token_ids=())) for item in asked]
    other = torch_engine(model_dir, model)
    texts = [(*item.prompt_ids, *run(other, [item])[item.response].token_ids) for item in endless]
    other.close()
    runner = engine._core._engine.collective_rpc(lambda worker: worker.model_runner)[0]
    states, guess = runner.req_states, runner.speculator.propose

    def right(*given, **named):
        drafts = guess(*given, **named)
        batch = named["input_batch"] if "input_batch" in named else given[0]
        for row, slot in enumerate(batch.idx_mapping.tolist()):
            length = int(states.total_len.gpu[slot])
            tokens = tuple(states.all_token_ids.gpu[slot, :length].tolist())
            for text in texts:
                if text[:length] == tokens:
                    following = torch.tensor(text[length : length + drafts.shape[1]])
                    drafts[row, : len(following)] = following
        return drafts

    monkeypatch.setattr(runner.speculator, "propose", right)
    whole = deltas_of(engine, endless)
    cut = {}
    for deltas in whole:
        for delta in deltas:
            tokens = tokens_of(whole, delta.response)
            inner = [t for t in delta.token_ids[:-1] if tokens.index(t) >= len(tokens_before(whole, deltas, delta))]
            if inner:
                cut.setdefault(delta.response, (inner[0], tokens))
    assert cut, "no drafts hold a token that the response did not have"
    items = [
        replace(item, sampling=replace(item.sampling, stop_token_ids=(cut[item.response][0],)))
        for item in endless
        if item.response in cut
    ]
    for response, result in run(engine, items).items():
        stop, tokens = cut[response]
        assert result.token_ids == tokens[: tokens.index(stop) + 1]
        assert result.finish_reason.value == "stop"
        assert len(result.logprobs) == len(result.token_ids)


def tokens_before(whole, deltas, delta):
    """The tokens of a response before this step."""
    return tokens_of(whole[: whole.index(deltas)], delta.response)


@interpreted
@pytest.mark.exhaustive
def test_killed_between_drafts_it_is_resumed_without_a_change_also_by_an_engine_without(
    engine, asked, plain, model, model_dir
):
    begun = deltas_of(engine, asked, steps_max=4)
    engine.abort([item.response for item in asked])
    left = [
        resumed(item, tokens)
        for item in asked
        if len(tokens := tokens_of(begun, item.response)) < len(plain[item.response].token_ids)
    ]
    assert len(left) > 2
    other = torch_engine(model_dir, model)
    for found in (run(engine, left), run(other, left)):
        for item in left:
            assert [*item.generated_ids, *found[item.response].token_ids] == plain[item.response].token_ids
    other.close()


@interpreted
@pytest.mark.parametrize("fault", ["key of the position behind", "log-prob of the row before"])
def test_a_planted_fault_is_found(engine, asked, plain, monkeypatch, fault):
    """In the rows of drafts alone, which decoding without drafts does not have."""
    from tasks.sampling.engines.vllm_sampler import KeyedSlots  # noqa: PLC0415 - only where vLLM is

    whole = KeyedSlots.apply

    def key_behind(self, logits, ctx):
        return whole(self, logits, replace(ctx, pos=ctx.pos + (ctx.expanded_local_pos > 0)))

    def row_before(self, logits, ctx):
        drawn = whole(self, logits, ctx)
        values, ids = drawn.max(dim=1)
        values[1:] = values[:-1].where(ctx.expanded_local_pos[1:] > 0, values[1:])
        return drawn.scatter_(1, ids.unsqueeze(1), values.unsqueeze(1))

    monkeypatch.setattr(KeyedSlots, "apply", key_behind if fault.startswith("key") else row_before)
    found = run(engine, asked)
    same = all(found[response].token_ids == wanted.token_ids for response, wanted in plain.items())
    assert same == (fault == "log-prob of the row before")
    with pytest.raises(AssertionError):
        assert_same(found, plain)


@interpreted
@pytest.mark.exhaustive
@pytest.mark.parametrize("drafts", [1, 8, "auto"])
def test_no_number_of_drafts_changes_a_token(drafts, asked, plain, model, model_dir, ends_last):
    engine = ends_last.enter_context(closing(vllm(model_dir, model, drafts=drafts, source="ngram")))
    assert_same(run(engine, asked), plain)


@pytest.mark.skipif(INTERPRETED, reason="needs a vLLM that takes V1")
def test_model_runner_v1_is_refused_in_one_line(model_dir, model):
    with pytest.raises(EngineError, match=r"drafts: value 4; allowed: 0, because vLLM 0\.\S+ takes .* runner V1"):
        vllm(model_dir, model, drafts=4, source="ngram")


def test_fewer_drafts_the_more_responses_are_in_flight():
    assert drafts_by_responses() == [(1, 17, 8), (18, 32, 4), (33, 53, 2), (54, 80, 1), (81, 81, 0)]
    given = speculative_config(SpeculationConfig(drafts="auto", source="ngram"))
    assert (given["num_speculative_tokens"], given["rejection_sample_method"]) == (8, "standard")
    assert speculative_config(SpeculationConfig(drafts=3, source="ngram"))["num_speculative_tokens"] == 3
    assert speculative_config(SpeculationConfig()) is None


@interpreted
@pytest.mark.exhaustive
class TestContract(VllmContract):
    """Of the engines of `pool`."""
