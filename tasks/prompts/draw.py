"""Drawing an iteration's prompts: tokenises the prompts at running positions, for the prompt table."""

from collections.abc import Sequence
from dataclasses import replace

from storage.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.openings import opened
from tasks.prompts.order import prompt_index
from tasks.prompts.prompt import Prompt, PromptSet
from tasks.prompts.tokenise import AgentTokenizer, Tokenizer, tokenise


def prompts_at(prompts: PromptSet, data: DataConfig, first: int, count: int) -> list[Prompt]:
    """The prompts at running positions first .. first + count - 1."""
    places = [prompt_index(first + k, len(prompts), data.seed, data.shuffle) for k in range(count)]
    return [prompts[index] for _, index in places]


def draw_prompts(
    prompts: PromptSet,
    tokenizer: Tokenizer,
    data: DataConfig,
    *,
    first: int,
    count: int,
    context_length: int,
    max_completion_length: int,
    openings: Sequence[str | None] = (),
) -> list[PromptRow]:
    """The prompts at running positions first .. first + count - 1; raises PromptError naming one that does not fit.

    openings: what environments add to each of them, or what agents ask first; () if nothing.
    """
    rows = []
    for number, prompt in enumerate(prompts_at(prompts, data, first, count)):
        opening = openings[number] if openings else None
        if opening is not None and isinstance(tokenizer, AgentTokenizer):
            # The row keeps the prompt, because the agent is begun with it again.
            messages, shown = tokenizer.of_opening(opening)
            asked, kept = replace(prompt, text_or_messages=messages), prompt.text_or_messages
        else:
            asked, shown = replace(prompt, text_or_messages=opened(prompt, opening)), tokenizer
            kept = asked.text_or_messages
        ids = tokenise(asked, shown, data.max_prompt_length, context_length, max_completion_length)
        rows.append(PromptRow(prompt.id, ids, kept, prompt.columns, opening))
    return rows
