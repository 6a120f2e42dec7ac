"""The section `data`: the source of prompts, their order and their maximal length.

It imports neither torch nor a reader of files. Values are checked here, and files when they are opened.
"""

from dataclasses import dataclass, field
from typing import Annotated

from pydantic import ConfigDict, Field

ARITHMETIC = "arithmetic"
STRICT = ConfigDict(extra="forbid", strict=True)


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """The built-in generator: the number of items per problem is geometric, so answer lengths have a long tail.

    `stop_probability` is the probability that a problem ends after each item; `base` is the modulus of the running sum.
    """

    __pydantic_config__ = STRICT
    items_max: Annotated[int, Field(ge=1, le=26)] = 16
    stop_probability: Annotated[float, Field(gt=0, le=1)] = 0.2
    base: Annotated[int, Field(ge=2, le=10)] = 10


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompts of a run.

    `source` is "arithmetic" (the built-in generator, `size` prompts) or a path: a .jsonl or .parquet file, or a
    directory written by datasets.save_to_disk, whose part `split` names; or the id of a data set on the Hugging Face
    Hub, with its `subset`, `split` and `revision`. `limit` keeps the first rows only. Without
    `id_column`, the id is verl's extra_info.index if that is unique, else the row number. `seed` determines the
    generated problems and, with `shuffle`, the order within each epoch.
    """

    __pydantic_config__ = STRICT
    source: Annotated[str, Field(min_length=1)] = ARITHMETIC
    subset: Annotated[str, Field(min_length=1)] | None = None
    split: str | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None
    prompt_column: Annotated[str, Field(min_length=1)] = "prompt"
    id_column: str | None = None
    shuffle: bool = True
    seed: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1)] | None = None
    size: Annotated[int, Field(ge=1)] = 4096
    max_prompt_length: Annotated[int, Field(ge=1)] | None = None
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)

    def __post_init__(self) -> None:
        if self.source == ARITHMETIC:
            for name, value, default in (
                ("subset", self.subset, None),
                ("split", self.split, None),
                ("revision", self.revision, None),
                ("id_column", self.id_column, None),
                ("prompt_column", self.prompt_column, "prompt"),
            ):
                if value != default:
                    raise ValueError(
                        f"{name}: value {value!r}; allowed: only with a file or directory as source, "
                        f"not with the generator {ARITHMETIC!r}"
                    )
        if self.id_column is not None and self.id_column == self.prompt_column:
            raise ValueError(f"id_column: value {self.id_column!r}; allowed: another column than prompt_column")
