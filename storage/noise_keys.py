"""Keys of the sampling noise of responses (docs/format.md section 3), and the mixing of bits that they rest on."""

_MASK = (1 << 64) - 1


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
