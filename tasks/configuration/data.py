"""The section `data`: the source of prompts, the order and the maximal length.

It imports neither torch nor a reader of files. Values are checked here, and files when they are opened.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, JsonValue

from tasks.configuration.older_form import ARITHMETIC
from tasks.configuration.origins import iterations_of
from tasks.configuration.run_selection import SelectConfig

STRICT = ConfigDict(extra="forbid", strict=True)
# What tasks/prompts/row_comparison.py finds when it compares prompts with their rows.
Kind = Literal[
    "assistant_last",
    "dropped_characters",
    "dropped_message",
    "json_as_text",
    "no_generation_prompt",
    "stop_token_at_end",
    "two_bos",
    "unread_arguments",
]
# What is accepted is rendered as it would be anyway.
OPERATIONAL = ("allow",)
# Fields that are younger than runs that go on, with their defaults, at which they say what such a run does.
YOUNG: dict[str, object] = {
    "from": None,
    "pass_rate": None,
    "replay": None,
    "chat_template_kwargs": {},
    "completion_column": "completion",
    "chosen_column": "chosen",
    "rejected_column": "rejected",
    "continue_final_message": False,
    "runs": [],
    "select": None,
}
_Rate = Annotated[float, Field(ge=0, le=1)]
# How a chat template is called is not an argument of the template.
_NO_ARGUMENTS = {
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "max_length",
    "messages",
    "padding",
    "return_assistant_tokens_mask",
    "return_dict",
    "return_tensors",
    "tokenize",
    "tokenizer_kwargs",
    "tools",
    "truncation",
}


@dataclass(frozen=True, kw_only=True)
class ArithmeticConfig:
    """The built-in generator: the number of items of a problem is geometric, so lengths of answers have a long tail.

    Attributes:
        items_max: The most items of a problem.
        stop_probability: The probability that a problem ends after an item.
    """

    __pydantic_config__ = STRICT
    items_max: Annotated[int, Field(ge=1, le=26)] = 16
    stop_probability: Annotated[float, Field(gt=0, le=1)] = 0.2


@dataclass(frozen=True, kw_only=True)
class ReplayConfig:
    """Groups of other runs in each step, trained with the log-probs of the sampler that wrote them.

    Attributes:
        runs: Iterations of other runs, each <url>@<a>:<b>, without b; all must be committed.
        share: The share of a step's groups; rounded to whole groups.
    """

    __pydantic_config__ = STRICT
    runs: Annotated[tuple[str, ...], Field(min_length=1)]
    share: Annotated[float, Field(gt=0, lt=1)] = 0.25

    def __post_init__(self) -> None:
        for text in self.runs:
            if iterations_of(text, "runs").iterations.partition(":")[2] == "":
                raise ValueError(f"runs: value {text!r}; allowed: <url>@<a>:<b> with b, so that the choice is settled")

    def groups(self, num_prompts: int) -> int:
        """How many of a step's groups are replayed."""
        return round(self.share * num_prompts)


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The prompts of a run.

    Attributes:
        source: "arithmetic" (the generator), a .csv, .jsonl or .parquet file, a directory written by
            datasets.save_to_disk, or the id of a data set on the Hugging Face Hub.
        subset: Of an id: the data set's configuration.
        split: The part of a directory or of a data set.
        revision: Of an id: branch, tag or commit.
        prompt_column: The column with the prompt.
        completion_column: With `algorithm.kind` "sft", the column with the completion; None: `prompt_column` has whole
            conversations, with the completion.
        chosen_column: With `algorithm.kind` "dpo", the column with the preferred completion.
        rejected_column: Likewise, with the other completion.
        runs: Other runs, or <url>@<first>:<stop> for some of their iterations, whose responses are the examples.
        select: Which responses of `runs` are; None: all that ended by themselves.
        shuffle: A new order in each epoch.
        seed: Seed of the generated problems and of the order.
        limit: The first rows alone, so many; the number of generated prompts, older_form.SIZE by default.
        from_: Another run, <url> or <url>@<a>:<b> (iterations without b), from which lengths and pass rates of the
            prompts are known; None: none.
        pass_rate: The least and the greatest pass rate of a prompt there; other prompts are left out. None: all stay.
        max_prompt_length: A prompt with more tokens is refused.
        chat_template_kwargs: Arguments of the chat template; a row's column of this name comes first.
        continue_final_message: The policy goes on with a last message by the assistant.
        allow: The kinds of differences between a row and the prompt that are accepted.
        arithmetic: The generator's settings.
        replay: Stored responses of other runs in each step; None: none.
    """

    __pydantic_config__ = STRICT
    source: Annotated[str, Field(min_length=1)] = ARITHMETIC
    subset: Annotated[str, Field(min_length=1)] | None = None
    split: str | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None
    prompt_column: Annotated[str, Field(min_length=1)] = "prompt"
    completion_column: Annotated[str, Field(min_length=1)] | None = "completion"
    chosen_column: Annotated[str, Field(min_length=1)] = "chosen"
    rejected_column: Annotated[str, Field(min_length=1)] = "rejected"
    runs: tuple[Annotated[str, Field(min_length=1)], ...] = ()
    select: SelectConfig | None = None
    shuffle: bool = True
    seed: Annotated[int, Field(ge=0)] = 0
    limit: Annotated[int, Field(ge=1)] | None = None
    from_: Annotated[Annotated[str, Field(min_length=1)] | None, Field(alias="from")] = None
    pass_rate: tuple[_Rate, _Rate] | None = None
    max_prompt_length: Annotated[int, Field(ge=1)] | None = None
    chat_template_kwargs: dict[str, JsonValue] = field(default_factory=dict)
    continue_final_message: bool = False
    allow: tuple[Kind, ...] = ()
    arithmetic: ArithmeticConfig = field(default_factory=ArithmeticConfig)
    replay: ReplayConfig | None = None

    def __post_init__(self) -> None:
        for text in self.runs:
            iterations_of(text, "runs")
        reserved = no_argument(self.chat_template_kwargs)
        if reserved is not None:
            raise ValueError(f"chat_template_kwargs: value {reserved!r}; allowed: arguments of the chat template")
        if self.from_ is not None:
            iterations_of(self.from_)
        if self.pass_rate is not None and (self.from_ is None or self.pass_rate[0] > self.pass_rate[1]):
            raise ValueError(
                f"pass_rate: value {list(self.pass_rate)}; allowed: the least and the greatest rate, with data.from"
            )
        if self.source == ARITHMETIC:
            for name, value, default in (
                ("subset", self.subset, None),
                ("split", self.split, None),
                ("revision", self.revision, None),
                ("prompt_column", self.prompt_column, "prompt"),
                ("chat_template_kwargs", self.chat_template_kwargs, {}),
                ("continue_final_message", self.continue_final_message, False),
            ):
                if value != default:
                    raise ValueError(
                        f"{name}: value {value!r}; allowed: only with a file or directory as source, "
                        f"not with the generator {ARITHMETIC!r}"
                    )


def no_argument(names: Iterable[str]) -> str | None:
    """The first of these names that is no argument of a chat template, but says how one is called; None without one."""
    return next((name for name in names if name in _NO_ARGUMENTS), None)
