"""Keys of the sampling noise of responses (docs/format.md section 3), and seeds of the environments of groups."""

_MASK = (1 << 64) - 1
_SEED_BITS = 31


def mix64(value: int) -> int:
    """The splitmix64 finaliser on a 64-bit integer (Steele, Lea, Flood 2014)."""
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & _MASK
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & _MASK
    return value ^ (value >> 31)


def noise_key(run_seed: int, iteration: int, response: int) -> int:
    """The 64-bit key of a response's sampling noise, which does not depend on the member, the attempt or the time."""
    key = mix64(run_seed & _MASK)
    for part in (iteration, response):
        key = mix64((key + (part + 1) * 0x9E3779B97F4A7C15) & _MASK)
    return key


def group_seed(run_seed: int, iteration: int, group: int) -> int:
    """An integer below 2^31 that all responses of a group share: their environments begin alike.

    The seed is the noise key (docs/format.md section 3) of the group's number, mixed once more to differ from the noise
    key of every response.
    """
    return mix64(noise_key(run_seed, iteration, group)) >> (64 - _SEED_BITS)
