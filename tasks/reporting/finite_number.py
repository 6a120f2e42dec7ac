"""The numbers that commands take: finite, and no more than any clock or bill holds."""

import math
from typing import Any

import click

MOST = 1e9


class FiniteNumber(click.FloatRange):
    """A number from `min` (or above it, with `min_open`) to MOST; click's own ranges hold nan, and may hold inf."""

    def __init__(self, *, min: float = 0.0, min_open: bool = False) -> None:  # noqa: A002 - as click calls it
        super().__init__(min=min, max=MOST, min_open=min_open)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """The number; what is none, or lies elsewhere, ends the command with the option and what is allowed."""
        number = float(super().convert(value, param, ctx))
        if math.isnan(number):
            self.fail(f"{value} is not a number.", param, ctx)
        return number
