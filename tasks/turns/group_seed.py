"""The seed with which the environments of a group are reset, in `plan` and in members."""

from storage.noise_keys import mix64, noise_key

_SEED_BITS = 31


def group_seed(run_seed: int, iteration: int, group: int) -> int:
    """An integer below 2^31 that all responses of a group share, so that their environments begin alike.

    It is the key of a response's noise (docs/format.md section 3) with the group's number, mixed once more, so that it
    is no key of any response.
    """
    return mix64(noise_key(run_seed, iteration, group)) >> (64 - _SEED_BITS)
