"""The argument of commands that take a configuration: its file, and fields to change beside it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import click

from tasks.configuration.overrides import load_with
from tasks.configuration.run_config import RunConfig

Command = TypeVar("Command", bound=Callable[..., object])


@dataclass(frozen=True, kw_only=True)
class GivenConfig:
    """A configuration as a command line gives it.

    Attributes:
        path: the YAML or JSON file.
        overrides: FIELD=VALUE, in the order in which they count.
    """

    path: Path
    overrides: tuple[str, ...]

    def load(self) -> RunConfig:
        """The configuration; raises ConfigError, which names the file and every wrong field."""
        return load_with(self.path, self.overrides)

    def __str__(self) -> str:
        return " ".join((str(self.path), *self.overrides))


def config_argument(*, required: bool = True) -> Callable[[Command], Command]:
    """The argument CONFIG [FIELD=VALUE]... as `config`: a GivenConfig, or None where there need not be one."""
    metavar = "CONFIG [FIELD=VALUE]..." if required else "[CONFIG [FIELD=VALUE]...]"
    return click.argument("config", nargs=-1, required=required, metavar=metavar, callback=_given)


def _given(_context: click.Context, _parameter: click.Parameter, words: tuple[str, ...]) -> GivenConfig | None:
    return GivenConfig(path=Path(words[0]), overrides=words[1:]) if words else None
