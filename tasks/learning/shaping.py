"""Shaping: how the length of a response changes its reward, and whether it is trained at all. Pure functions.

A penalty is added to the reward before advantages are computed.
"""

from collections.abc import Sequence

from torch import Tensor

from tasks.configuration.algorithm import AlgorithmConfig


def overlong_penalties(lengths: Tensor, max_completion_length: int, buffer_length: int, factor: float) -> Tensor:
    """DAPO's soft punishment of long responses, to be added to their rewards; [B] float64, from -factor to 0.

    Zero up to max_completion_length - buffer_length tokens, then falling linearly to -factor at
    max_completion_length. arXiv 2503.14476, section 3.4, equation 13, whose factor is 1.

    Args:
        lengths: [B] integer, tokens per response.
        max_completion_length: The run's limit.
        buffer_length: The number of tokens over which the reward falls, from 1 to max_completion_length.
        factor: The penalty at the limit.

    Raises:
        ValueError: The buffer is not within the limit.
    """
    if not 1 <= buffer_length <= max_completion_length:
        raise ValueError(
            f"overlong_buffer_length: value {buffer_length}; "
            f"allowed: 1 to max_completion_length ({max_completion_length})"
        )
    excess = lengths.double() - (max_completion_length - buffer_length)
    return -factor * (excess / buffer_length).clamp(0.0, 1.0)


def counted_responses(finish_reasons: Sequence[str], num_generations: int) -> list[int]:
    """The indices of responses whose environment survived; a group with fewer than two survivors is dropped.

    A response fails when its environment is lost, so the failure says nothing about the policy. A group with lost
    environments is learned like a smaller group; a lone survivor has no response to be compared with. `finish_reasons`
    are the reasons of whole groups, in order.
    """
    groups = range(0, len(finish_reasons), num_generations)
    ended = [[i for i in range(start, start + num_generations) if finish_reasons[i] != "failed"] for start in groups]
    return [index for group in ended if len(group) >= min(2, num_generations) for index in group]


def trained_responses(finish_reasons: Sequence[str], algorithm: AlgorithmConfig, num_generations: int) -> list[int]:
    """The indices of trained responses: counted responses, with mask_truncated only if the model ended the response.

    This is DAPO's overlong filtering (arXiv 2503.14476, section 3.4). Rewards of masked responses still count in the
    group's mean. In the step's denominator, masked responses count as responses and not as tokens, as in verl and TRL,
    so the seq-mean-* losses are smaller by the share of masked responses.

    Args:
        finish_reasons: "length" if the length limit, not the model, ended the response; of whole groups.
        algorithm: mask_truncated is used.
        num_generations: The responses of a group.
    """
    counted = counted_responses(finish_reasons, num_generations)
    return [index for index in counted if not (algorithm.mask_truncated and finish_reasons[index] == "length")]
