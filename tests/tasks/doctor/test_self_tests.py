"""The self-tests of kernels, and the faults that they are for."""

import torch
from torch.nn import functional as F  # noqa: N812

from tasks.doctor.self_tests import attention_finding, noise_finding
from tasks.sampling.engines.keyed_noise import sample

CPU = torch.device("cpu")


def test_this_machine_s_cpu_passes():
    noise, attention = noise_finding(CPU), attention_finding(CPU)
    assert (noise.lack, attention.lack) == (None, None)
    assert noise.shown.startswith("8 of 8 tokens")
    assert attention_finding(CPU, dtype=torch.bfloat16).lack is None


def test_noise_of_the_next_position_is_found():
    def late(logits, keys, positions, *more, **flags):
        return sample(logits, keys, positions + 1, *more, **flags)

    assert "of 8 tokens are the reference's" in noise_finding(CPU, late).lack


def test_wrong_log_probs_of_the_right_tokens_are_found():
    def shifted(*given, **flags):
        token_ids, logprobs = sample(*given, **flags)
        return token_ids, logprobs + 0.001

    finding = noise_finding(CPU, shifted)
    assert finding.lack is not None
    assert finding.shown.startswith("8 of 8 tokens")


def test_attention_without_its_scale_is_found():
    def unscaled(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, scale=1.0)

    assert attention_finding(CPU, unscaled).lack is not None


def test_a_wrong_gradient_of_a_right_result_is_found():
    def detached(query, key, value):
        return F.scaled_dot_product_attention(query, key, value) + 0 * value.sum() + (value - value.detach()).sum()

    assert attention_finding(CPU, detached).lack is not None


def test_a_result_that_is_no_number_is_found():
    def broken(query, key, value):
        return F.scaled_dot_product_attention(query, key, value) * torch.nan

    assert attention_finding(CPU, broken).lack is not None
