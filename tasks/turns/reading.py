"""Reading conversations back: from the tokens of a response to the chat messages that rewards see."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from storage.prompt_table import PromptRow
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.conversation import Conversation
from tasks.turns.first_request import read_opening
from tasks.turns.own_template import Message
from tasks.turns.process_environments import load_schemas

ReadMessages = Callable[
    [PromptRow, Sequence[int], Sequence[int], Sequence[bytes]], tuple[Sequence[Message], list[Message]]
]
"""The messages of a prompt, and those of its response, from the token ids, the origins and the events of the latter."""


def message_reader(turns: TurnsConfig | None, model_dir: Path, stop_token_ids: Collection[int]) -> ReadMessages | None:
    """A function that reads the responses of a run; None without turns.

    stop_token_ids: of the plan. It loads the tools in a child process. Raises ToolsUnusable and the errors of
    transformers.
    """
    if turns is None:
        return None
    tokenizer = read_tokenizer(model_dir)
    if turns.agent is not None:
        return _of_agents(AgentLanguage(tokenizer, stop_token_ids))
    conversation = Conversation(tokenizer, load_schemas(turns), stop_token_ids)

    def read(
        row: PromptRow, token_ids: Sequence[int], origins: Sequence[int], events: Sequence[bytes]
    ) -> tuple[Sequence[Message], list[Message]]:
        asked = [{"role": "user", "content": row.prompt}] if isinstance(row.prompt, str) else row.prompt
        return asked, conversation.messages([], token_ids, origins, events)

    return read


def _of_agents(language: AgentLanguage) -> ReadMessages:
    def read(
        row: PromptRow, token_ids: Sequence[int], origins: Sequence[int], events: Sequence[bytes]
    ) -> tuple[Sequence[Message], list[Message]]:
        first = read_opening(row.opening)
        return first.messages, language.said(first.tools, token_ids, origins, events)

    return read
