"""The plan of an iteration as a pure function: which member of the crew starts with which groups."""

from storage.records import SamplingParams
from tasks.sampling.config import SamplingConfig


def assign_groups(num_groups: int, num_slots: int) -> tuple[tuple[int, ...], ...]:
    """Deal groups to slots in turn: slot s starts with groups s, s + num_slots, ...; sizes differ by at most one.

    A group stays whole, so that its prompt is prefilled once. Slots beyond the number of groups get nothing.
    """
    if num_groups < 1 or num_slots < 1:
        raise ValueError(f"{num_groups} groups on {num_slots} slots; allowed: at least one of each")
    return tuple(tuple(range(slot, num_groups, num_slots)) for slot in range(num_slots))


def sampling_params(config: SamplingConfig, stop_token_ids: tuple[int, ...]) -> SamplingParams:
    """How the iteration's tokens are drawn: the user's settings and the model's end-of-sequence ids."""
    return SamplingParams(
        temperature=config.temperature,
        top_p=config.top_p,
        top_k=config.top_k,
        max_completion_length=config.max_completion_length,
        stop_token_ids=stop_token_ids,
    )
