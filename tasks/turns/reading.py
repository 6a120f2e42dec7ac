"""Reading conversations back: from the tokens of a response to the chat messages that rewards see."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

from tasks.configuration.turns import TurnsConfig
from tasks.prompts.auto_tokenizer import read_tokenizer
from tasks.turns.conversation import Conversation
from tasks.turns.own_template import Message
from tasks.turns.process_environments import load_schemas

ReadMessages = Callable[[Sequence[Message], Sequence[int], Sequence[int], Sequence[bytes]], list[Message]]
"""The messages of a whole conversation, from those of its prompt, its token ids, its origins and its events."""


def message_reader(turns: TurnsConfig | None, model_dir: Path, stop_token_ids: Collection[int]) -> ReadMessages | None:
    """A function that reads the responses of a run; None without turns.

    stop_token_ids: of the plan. It loads the tools in a child process. Raises ToolsUnusable and the errors of
    transformers.
    """
    if turns is None:
        return None
    return Conversation(read_tokenizer(model_dir), load_schemas(turns), stop_token_ids).messages
