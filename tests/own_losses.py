"""Policy losses of tests, as a user writes them; the configuration names them as "tests.own_losses:..."."""

import torch

from tasks.learning.policy_losses import LossInputs, LossOutputs


def clipped(inputs: LossInputs) -> LossOutputs:
    """The built-in "clip", written anew."""
    ratio = (inputs.logprobs - inputs.old_logprobs).clamp(-20, 20).exp()
    bounded = ratio.clamp(1 - inputs.clip_ratio_low, 1 + inputs.clip_ratio_high)
    gain = torch.minimum(ratio * inputs.token_advantages, bounded * inputs.token_advantages)
    return LossOutputs(
        loss=-gain,
        clipped_low=(ratio < 1 - inputs.clip_ratio_low) & (inputs.token_advantages < 0),
        clipped_high=(ratio > 1 + inputs.clip_ratio_high) & (inputs.token_advantages > 0),
        metrics={"ratio": ratio.detach()},
    )


def of_whole_responses(inputs: LossInputs) -> LossOutputs:
    """The built-in "gspo", written anew: a token's loss depends on all tokens of its response."""
    lengths = inputs.response_mask.sum(dim=1, keepdim=True).clamp(min=1)
    mean = (inputs.logprobs.detach() - inputs.old_logprobs).sum(dim=1, keepdim=True) / lengths
    ratio = (mean + inputs.logprobs - inputs.logprobs.detach()).exp()
    bounded = ratio.clamp(1 - inputs.clip_ratio_low, 1 + inputs.clip_ratio_high)
    return LossOutputs(loss=-torch.minimum(ratio * inputs.token_advantages, bounded * inputs.token_advantages))


def a_tensor(inputs: LossInputs) -> torch.Tensor:
    return inputs.logprobs


def without_gradient(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=-inputs.token_advantages * inputs.logprobs.detach())


def of_responses(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs.sum(dim=1))


def metric_of_a_number(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs, metrics={"mean": 3.0})  # type: ignore[dict-item]


def metric_that_is_not_finite(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs, metrics={"gap": (inputs.logprobs.detach() - inputs.logprobs).log()})


def metric_with_a_slash(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs, metrics={"actor/mean": inputs.logprobs})


def numbers_for_clipped(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss=inputs.logprobs, clipped_low=inputs.logprobs)


def of_two_arguments(inputs: LossInputs, more: int) -> LossOutputs:
    raise NotImplementedError(inputs, more)
