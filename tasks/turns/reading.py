"""Reading conversations back: from the tokens of a response to the chat messages that rewards see."""

from collections.abc import Callable, Sequence
from pathlib import Path

from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.conversation import Conversation
from tasks.turns.first_request import read_opening
from tasks.turns.own_template import Message

ReadMessages = Callable[
    [PromptRow, Sequence[int], Sequence[int], Sequence[bytes]], tuple[Sequence[Message], list[Message]]
]
"""The messages of a prompt, and those of its response, from the token ids, the origins and the events of the latter."""


def message_reader(turns: TurnsConfig | None, plan: PlanRecord, model_dir: Path) -> ReadMessages | None:
    """A function that reads the responses of an iteration; None without turns. Raises the errors of transformers."""
    if turns is None:
        return None
    tokenizer = read_tokenizer(model_dir)
    stops, skips = plan.sampling.stop_token_ids, plan.sampling.skip_special_tokens
    if turns.agent is not None:
        return _of_agents(AgentLanguage(tokenizer, stops, skip_special_tokens=skips))
    conversation = Conversation(tokenizer, plan.tools, stops, skip_special_tokens=skips)

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
        return first.messages, language.messages(first.tools, token_ids, origins, events)

    return read
