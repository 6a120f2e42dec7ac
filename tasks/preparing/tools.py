"""Tools in prompts: the tokenizer that renders them, and what environments add to the prompts of their groups."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.configuration.run_config import RunConfig
from tasks.configuration.turns import TurnsConfig
from tasks.learning.pretrained import stop_token_ids
from tasks.preparing.tokenizer import open_tokenizer
from tasks.prompts.openings import reset_columns
from tasks.prompts.prompt import Message, Prompt, PromptError
from tasks.prompts.tokenise import Tokenizer
from tasks.sampling.engines.choose import context_length
from tasks.turns.conversation import Conversation
from tasks.turns.group_seed import group_seed
from tasks.turns.process_environments import load_schemas, reset_texts
from tasks.turns.tool_schemas import check_names

# What `reset` returns for each of the columns and seeds.
Resets = Callable[[TurnsConfig, Sequence[Mapping[str, Any]], Sequence[int]], list[str | None]]


class ToolTokenizer:
    """A Tokenizer of prompts that tell the policy of its tools."""

    def __init__(self, conversation: Conversation) -> None:
        self._conversation = conversation

    def __call__(self, text: str) -> Mapping[str, Any]:
        """Raise PromptError: tools stand in a chat template, and text does not go through one."""
        raise PromptError(f"it is text of {len(text)} characters; allowed with turns: chat messages")

    def apply_chat_template(self, conversation: list[Message], **_rendering: Any) -> tuple[int, ...]:
        """The tokens of the prompt, with the tools and the generation prompt."""
        return self._conversation.prompt_ids(conversation)


def prompt_tokenizer(config: RunConfig, model_dir: Path) -> Tokenizer:
    """The tokenizer of prompts; with `turns` it loads the tools in a child process, and checks the chat template.

    Raises ModelError, ToolsUnusable and TemplateError.
    """
    # First: a tokenizer that reads a wrong configuration of the model complains of itself.
    context_length(config.rollout, model_dir)
    tokenizer = open_tokenizer(model_dir)
    if config.turns is None:
        return tokenizer
    schemas = load_schemas(config.turns)
    check_names(config.turns, schemas)
    conversation = Conversation(tokenizer, schemas, stop_token_ids(model_dir))
    conversation.check()
    return ToolTokenizer(conversation)


def openings(
    config: RunConfig, prompts: Sequence[Prompt], run_seed: int, iteration: int, resets: Resets = reset_texts
) -> list[str | None]:
    """What the environment adds to each group's prompt: one reset per group. [] without an environment.

    Raises ToolsUnusable if an environment cannot be reset.
    """
    if config.turns is None or config.turns.environment is None:
        return []
    columns = [reset_columns(prompt.text_or_messages, prompt.columns) for prompt in prompts]
    return resets(config.turns, columns, [group_seed(run_seed, iteration, group) for group in range(len(prompts))])
