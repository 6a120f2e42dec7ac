"""The tokenizer of prompts, with tools or without, and the additions of environments and agents to prompts."""

import json
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from storage.journal.noise_keys import group_seed
from storage.records import model_files
from storage.records.prompt_table import PromptRow
from storage.records.run import connect_to_run, read_run
from tasks.configuration.data import SUBMITTED, DataConfig
from tasks.configuration.origins import iterations_of
from tasks.configuration.run_config import RunConfig
from tasks.configuration.turns import TurnsConfig
from tasks.learning.pretrained import ModelError
from tasks.preparing.stop_tokens import find_stop_tokens
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.prompts.openings import reset_columns
from tasks.prompts.prompt import Message, Prompt, PromptError, PromptSet
from tasks.prompts.row_comparison import compare
from tasks.prompts.template_trial import try_templates
from tasks.prompts.tokenise import Tokenizer
from tasks.sampling.engines.choose import context_length
from tasks.turns.conversation import Conversation
from tasks.turns.first_request import read_opening
from tasks.turns.opened_environments import first_requests, load_schemas, reset_texts
from tasks.turns.tool_schemas import Schema, check_names

# The result of `reset`, or the first request of an agent, for each of the columns and seeds.
Resets = Callable[[TurnsConfig, Sequence[Mapping[str, Any]], Sequence[int]], Sequence[str | None]]

# Without any of these files transformers makes a tokenizer that knows no word.
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")


class ToolTokenizer:
    """A Tokenizer of prompts that tell the policy of its tools. of_model: the underlying tokenizer of transformers."""

    def __init__(self, conversation: Conversation, of_model: Any) -> None:
        self._conversation = conversation
        self.of_model = of_model

    @property
    def tools(self) -> tuple[Schema, ...]:
        """The tools of which every prompt tells the policy."""
        return self._conversation.tools

    def __call__(self, text: str) -> Mapping[str, Any]:
        """Raise PromptError: tools stand in a chat template, and text does not go through one."""
        raise PromptError(f"it is text of {len(text)} characters; allowed with turns: chat messages")

    def apply_chat_template(
        self, conversation: list[Message], *, add_generation_prompt: bool = True, tokenize: bool = True, **_row: Any
    ) -> Any:
        """The prompt as token ids, or as text, with the tools of the run; tools of a row are not shown."""
        if tokenize:
            return self._conversation.prompt_ids(conversation)
        return self._conversation.prompt_text(conversation, asks=add_generation_prompt)


class FirstRequestTokenizer(ToolTokenizer):
    """A Tokenizer of prompts that an agent's first request determines; prompts without a request have no tools."""

    def __init__(self, tokenizer: Any, stops: Collection[int]) -> None:
        """Raises TemplateError."""
        super().__init__(Conversation(tokenizer, (), stops), tokenizer)
        self._stops = stops
        self._of_tools: dict[str, ToolTokenizer] = {}
        self._conversation.check()

    def of_opening(self, opening: str) -> tuple[list[Message], Tokenizer]:
        """See AgentTokenizer; the chat template is checked once with each set of tools."""
        first = read_opening(opening)
        name = json.dumps(first.tools)
        if name not in self._of_tools:
            conversation = Conversation(self.of_model, first.tools, self._stops)
            conversation.check()
            self._of_tools[name] = ToolTokenizer(conversation, self.of_model)
        return list(first.messages), self._of_tools[name]


def open_tokenizer(model_dir: Path) -> Tokenizer:
    """The tokenizer of a model directory; raises ModelError without a usable tokenizer."""
    if not any((model_dir / name).is_file() for name in TOKENIZER_FILES):
        raise ModelError(f"policy.path: no tokenizer in {str(model_dir)!r}; looked for {', '.join(TOKENIZER_FILES)}")
    try:
        tokenizer: Tokenizer = read_tokenizer(model_dir)
    except Exception as error:  # a damaged file can raise anything in the library that reads it
        reason = " ".join(str(error).split())[:300]
        raise ModelError(f"policy.path: no usable tokenizer in {str(model_dir)!r}: {reason}") from error
    return tokenizer


def prompt_tokenizer(config: RunConfig, model_dir: Path, *, is_new: bool = True) -> Tokenizer:
    """The tokenizer of prompts; with `turns` it loads the tools in a child process, and checks the chat template.

    is_new: no run has used the tokenizer yet, so the chat template is tried in a child process first. Raises
    ModelError, PromptError, ToolsUnusable and TemplateError.
    """
    _check_turns(config)
    # First, because a tokenizer with a wrong configuration of the model would complain about the tokenizer instead.
    context_length(config.rollout, model_dir)
    tokenizer = open_tokenizer(model_dir)
    if is_new:
        try_templates(tokenizer)
    if config.turns is None:
        return tokenizer
    stops = find_stop_tokens(model_dir, tokenizer, in_chat=True).ids
    if config.turns.agent is not None:
        return FirstRequestTokenizer(tokenizer, stops)
    schemas = load_schemas(config.turns)
    check_names(config.turns, schemas)
    conversation = Conversation(tokenizer, schemas, stops)
    conversation.check()
    return ToolTokenizer(conversation, tokenizer)


def model_tokenizer(tokenizer: Tokenizer) -> Any:
    """The tokenizer of transformers in a tokenizer of `prompt_tokenizer`."""
    return tokenizer.of_model if isinstance(tokenizer, ToolTokenizer) else tokenizer


def _check_turns(config: RunConfig) -> None:
    """Raise PromptError for settings of a data set with which no turn is shown yet."""
    sections = {"data": config.data} | ({"evaluation.data": config.evaluation.data} if config.evaluation else {})
    for section, data in sections.items() if config.turns is not None else ():
        for name, value, allowed in (
            ("chat_template_kwargs", data.chat_template_kwargs, {}),
            ("continue_final_message", data.continue_final_message, False),
        ):
            if value != allowed:
                raise PromptError(f"{section}.{name}: value {value!r}; allowed with turns: {allowed!r}")


def check_vocabularies(data: DataConfig, model_dir: Path, tokenizer: Any) -> None:
    """Raise PromptError for a run of `data.runs` whose tokenizer has other tokens than the model's."""
    ours = model_files.describe(model_dir)
    for text in data.runs:
        store = connect_to_run(iterations_of(text).url)
        theirs = read_run(store).model_files
        if all(ours.get(name) == theirs.get(name) for name in TOKENIZER_FILES):
            continue
        with model_files.downloaded(store) as folder:
            there, here = read_tokenizer(folder).get_vocab(), tokenizer.get_vocab()
        for token in sorted(there.keys() | here.keys()):
            if there.get(token) != here.get(token):
                raise PromptError(
                    f"data.runs: value {text!r}, in whose tokenizer {token!r} is {there.get(token, 'no token')}, and "
                    f"{here.get(token, 'no token')} in that of policy.path; allowed: runs with the same tokens"
                )


def compared(
    rows: Sequence[PromptRow],
    prompts: PromptSet,
    tokenizer: Tokenizer,
    model_dir: Path,
    data: DataConfig,
    section: str = "data",
) -> list[str]:
    """Doubts about prompts of `prompt_tokenizer`: see `compare`.

    Prompts of other runs are tokens already; raises PromptError unless the runs have the same vocabulary. Submitted
    tokens are the program's own business.
    """
    of_model = model_tokenizer(tokenizer)
    if data.runs:
        check_vocabularies(data, model_dir, of_model)
        return []
    if data.source == SUBMITTED and any(prompt.token_ids is not None for prompt in prompts):
        return []
    in_chat = any(not isinstance(row.prompt, str) for row in rows)
    stops = find_stop_tokens(model_dir, of_model, in_chat=in_chat).ids
    return compare(rows, prompts, tokenizer, of_model, data, stops, section)


def shown_tools(tokenizer: Tokenizer) -> tuple[Schema, ...]:
    """The tools that a tokenizer of `prompt_tokenizer` shows the policy in every prompt."""
    return tokenizer.tools if isinstance(tokenizer, ToolTokenizer) else ()


def openings(
    config: RunConfig, prompts: Sequence[Prompt], run_seed: int, iteration: int, resets: Resets | None = None
) -> Sequence[str | None]:
    """The addition of the environment to each group's prompt, or the agent's first request: a reset or start per group.

    [] without an environment or an agent. Raises ToolsUnusable if an environment cannot be reset, or an agent makes no
    request.
    """
    if config.turns is None or (config.turns.environment is None and config.turns.agent is None):
        return []
    if resets is None:
        resets = reset_texts if config.turns.agent is None else first_requests
    columns = [reset_columns(prompt.text_or_messages, prompt.columns) for prompt in prompts]
    return resets(config.turns, columns, [group_seed(run_seed, iteration, group) for group in range(len(prompts))])
