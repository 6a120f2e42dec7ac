"""What "auto" means for batch-invariant kernels, by the rest of the configuration."""

import pytest

from tasks.configuration.run_config import parse
from tasks.sampling.engines.choose import engine_settings

MINIMAL = {
    "run": {"url": "runs/x"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}


def invariant(given=None, **algorithm):
    vllm = {} if given is None else {"batch_invariant": given}
    config = parse(MINIMAL | {"algorithm": algorithm, "rollout": {"vllm": vllm, "max_responses_in_flight": 7}})
    settings = engine_settings(config)
    assert settings.max_responses_in_flight == 7
    return settings.vllm.batch_invariant


@pytest.mark.parametrize(
    ("algorithm", "on"),
    [
        ({}, False),
        ({"importance_sampling": "token"}, False),
        ({"importance_sampling": "sequence-mask"}, False),
        ({"old_logprobs": "sampler"}, False),
        ({"importance_sampling": "none"}, True),
    ],
)
def test_auto_is_on_only_where_nothing_corrects_for_the_sampler(algorithm, on):
    assert invariant(**algorithm) is on
    assert invariant("auto", **algorithm) is on


@pytest.mark.parametrize("said", [True, False])
@pytest.mark.parametrize("algorithm", [{}, {"importance_sampling": "none"}])
def test_what_the_user_says_counts(said, algorithm):
    assert invariant(said, **algorithm) is said
