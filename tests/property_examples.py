"""How many examples an expensive property is tried with: a part of what the profile of tests/conftest.py asks for."""

from hypothesis import settings


def part_of_examples(part: float) -> int:
    """This part of the profile's examples, at least 2; 1 is all."""
    return max(2, round(part * settings.default.max_examples))
