"""Drawing an iteration's prompts: tokenises the prompts at running positions, for the prompt table."""

from storage.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.order import prompt_index
from tasks.prompts.prompt import PromptSet
from tasks.prompts.tokenise import Tokenizer, tokenise


def draw_prompts(
    prompts: PromptSet,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    first: int,
    count: int,
    context_length: int,
    max_completion_length: int,
) -> list[PromptRow]:
    """The prompts at running positions first .. first + count - 1; raises PromptError naming one that does not fit."""
    rows = []
    for position in range(first, first + count):
        _, index = prompt_index(position, len(prompts), data.seed, data.shuffle)
        prompt = prompts[index]
        ids = tokenise(prompt, tokenizer, data.max_prompt_length, context_length, max_completion_length)
        rows.append(PromptRow(prompt.id, ids, prompt.text_or_messages, prompt.columns))
    return rows
