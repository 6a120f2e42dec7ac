import pytest

from tasks.configuration.rollout import RolloutConfig, SpeculationConfig, VllmConfig
from tasks.configuration.run_config import ConfigError, digest, parse

MINIMAL = {
    "run": {"url": "memory://x"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}
DRAFT_MODEL = "rollout.speculation.draft_model:"
DRAFTS = "allowed: an integer from 0 to 8, or auto"


def with_speculation(speculation, **rollout):
    return parse({**MINIMAL, "rollout": {"speculation": speculation, **rollout}})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"drafts": 9}, f"rollout.speculation.drafts: 9 given; {DRAFTS}"),
        ({"drafts": -1}, f"rollout.speculation.drafts: -1 given; {DRAFTS}"),
        ({"drafts": True}, f"rollout.speculation.drafts: true given; {DRAFTS}"),
        ({"drafts": 2.5}, f"rollout.speculation.drafts: 2.5 given; {DRAFTS}"),
        ({"drafts": "4"}, f'rollout.speculation.drafts: "4" given; {DRAFTS}'),
        ({"drafts": "Auto"}, f'rollout.speculation.drafts: "Auto" given; {DRAFTS}'),
        ({"drafts": None}, f"rollout.speculation.drafts: null given; {DRAFTS}"),
        ({"drafts": [4]}, "rollout.speculation.drafts: "),
        ({"source": "model"}, "input should be 'siblings', 'ngram' or 'draft_model'"),
        ({"source": "draft_model"}, f"{DRAFT_MODEL} missing; allowed with source 'draft_model': a directory or an id"),
        ({"draft_model": "x"}, f"{DRAFT_MODEL} value 'x'; allowed with source 'siblings': null"),
        ({"revision": "main"}, "rollout.speculation.revision: value 'main'; allowed without draft_model: null"),
        ({"source": "draft_model", "draft_model": ""}, DRAFT_MODEL),
        ({"k": 4}, "rollout.speculation.k: unknown field"),
        (4, "rollout.speculation: 4 given"),
    ],
)
def test_hostile_values_get_one_line_that_names_what_is_allowed(value, message):
    with pytest.raises(ConfigError) as caught:
        with_speculation(value)
    (problem,) = caught.value.problems
    assert message in problem


def refused(speculation, **rollout):
    with pytest.raises(ConfigError) as caught:
        with_speculation(speculation, **rollout)
    (problem,) = caught.value.problems
    return problem


def test_drafts_are_for_an_engine_that_verifies_them():
    message = refused({"drafts": "auto"}, engine="scripted")
    assert "speculation.drafts: value auto; allowed with engine 'scripted': 0" in message
    assert with_speculation({"drafts": 0}, engine="scripted").rollout.speculation.drafts == 0


@pytest.mark.parametrize("engine", ["auto", "torch", "vllm"])
@pytest.mark.parametrize("source", ["siblings", "ngram"])
def test_an_engine_with_a_model_takes_every_source(engine, source):
    speculation = with_speculation({"source": source, "drafts": "auto"}, engine=engine).rollout.speculation
    assert speculation.source == source
    assert speculation.from_siblings == (source == "siblings")
    assert not with_speculation({"source": source}, engine=engine).rollout.speculation.from_siblings


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (
            {"device": "cpu"},
            "allowed with engine 'vllm' and device 'cpu': 0, because vLLM verifies drafts on GPUs alone",
        ),
        (
            {"vllm": {"batch_invariant": True}, "dtype": "bfloat16"},
            "allowed with vllm.batch_invariant true and dtype bfloat16: 0, because vLLM has no kernel",
        ),
    ],
)
@pytest.mark.parametrize("source", ["siblings", "ngram"])
def test_what_does_not_go_together_in_vllm_is_refused_and_only_with_drafts(source, rollout, message):
    drafts = {"drafts": 4, "source": source}
    assert message in refused(drafts, engine="vllm", **rollout)
    assert with_speculation({**drafts, "drafts": 0}, engine="vllm", **rollout).rollout.speculation.drafts == 0
    assert with_speculation({**drafts}, engine="torch", **rollout).rollout.speculation.drafts == 4


@pytest.mark.parametrize("source", ["siblings", "ngram"])
def test_drafts_are_not_for_adapters_in_vllm(source):
    given = {"speculation": SpeculationConfig(drafts=4, source=source), "vllm": VllmConfig(max_lora_rank=16)}
    for engine in ("auto", "vllm"):
        with pytest.raises(ValueError, match=r"drafts: value 4; allowed with vllm\.max_lora_rank 16: 0, because vLLM"):
            RolloutConfig(engine=engine, **given)
    assert RolloutConfig(engine="torch", **given).speculation.drafts == 4


def test_in_float32_batch_invariant_kernels_and_drafts_go_together():
    drafts = {"drafts": 4, "source": "ngram"}
    assert with_speculation(drafts, engine="vllm", vllm={"batch_invariant": True}).rollout.speculation.drafts == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("drafts", [0, 1, "auto"])
def test_with_drafts_only_float32_keeps_tokens(dtype, drafts):
    speculation = with_speculation({"drafts": drafts}).rollout.speculation
    assert speculation.keeps_tokens(dtype) == (drafts == 0 or dtype == "float32")


def test_they_are_off_by_default_and_no_part_of_what_is_learned():
    assert parse(MINIMAL).rollout.speculation.drafts == 0
    assert digest(with_speculation({"drafts": 4, "source": "ngram"})) == digest(parse(MINIMAL))


def test_a_draft_model_drafts_only_with_drafts_and_each_has_a_copy_of_its_own():
    given = [
        {"source": "draft_model", "draft_model": path, "revision": revision}
        for path, revision in (("small", None), ("smaller", None), ("small", "main"))
    ]
    found = [with_speculation({"drafts": "auto", **each}).rollout.speculation for each in given]
    assert [each.drafting_model for each in found] == ["small", "smaller", "small"]
    assert len({each.model_copy for each in found}) == 3
    off = with_speculation(given[0]).rollout.speculation
    assert off.drafting_model is None
    assert off.model_copy == found[0].model_copy
    assert digest(with_speculation({"drafts": 4, **given[0]})) == digest(parse(MINIMAL))
