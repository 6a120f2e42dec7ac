import pytest

from tasks.configuration.run_config import ConfigError, digest, parse

MINIMAL = {
    "run": {"url": "memory://x"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}
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
        ({"source": "draft_model"}, "input should be 'siblings' or 'ngram'"),
        ({"k": 4}, "rollout.speculation.k: unknown field"),
        (4, "rollout.speculation: 4 given"),
    ],
)
def test_hostile_values_get_one_line_that_names_what_is_allowed(value, message):
    with pytest.raises(ConfigError) as caught:
        with_speculation(value)
    (problem,) = caught.value.problems
    assert message in problem


@pytest.mark.parametrize("engine", ["vllm", "scripted"])
def test_drafts_are_for_an_engine_that_verifies_them(engine):
    with pytest.raises(ConfigError, match=rf"speculation\.drafts: value auto; allowed with engine '{engine}': 0"):
        with_speculation({"drafts": "auto"}, engine=engine)
    assert with_speculation({"drafts": 0}, engine=engine).rollout.speculation.drafts == 0
    for chosen in ("auto", "torch"):
        assert with_speculation({"drafts": "auto"}, engine=chosen).rollout.speculation.drafts == "auto"


def test_they_are_off_by_default_and_no_part_of_what_is_learned():
    assert parse(MINIMAL).rollout.speculation.drafts == 0
    assert digest(with_speculation({"drafts": 4, "source": "ngram"})) == digest(parse(MINIMAL))
