"""The benchmark of shared prompts: both arms learn from the same responses, and only one repeats the prompt."""

from dataclasses import replace

import pytest
import torch

from benchmarks.shared_prompts import GENERATIONS, group, speed
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.packing import pack
from tasks.learning.policy import Policy
from tests.tasks.learning.tiny_model import VOCABULARY, write_model


def test_a_group_leaves_out_what_seven_of_eight_prompts_repeat():
    batch = group(9, 4, VOCABULARY)
    assert batch.repeated_tokens == 8 * (GENERATIONS - 1)
    assert replace(batch, same_prompts=tuple(range(GENERATIONS))).repeated_tokens == 0


@pytest.mark.slow
def test_both_arms_compute_the_same(tmp_path):
    policy = Policy(tmp_path, write_model(tmp_path), TrainerConfig(device="cpu"))
    pack(policy.module)
    batch = group(30, 2, VOCABULARY)
    with torch.no_grad():
        expected = policy.logprobs(replace(batch, same_prompts=tuple(range(GENERATIONS))), 1.0)[0]
        torch.testing.assert_close(policy.logprobs(batch, 1.0)[0], expected)
    assert speed(policy, batch, 2).interval[0] > 0
