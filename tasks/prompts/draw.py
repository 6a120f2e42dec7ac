"""Drawing an iteration's prompts: tokenises the prompts at running positions, for the prompt table."""

from collections.abc import Sequence
from dataclasses import replace

from storage.records.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.openings import with_opening
from tasks.prompts.order import prompt_index
from tasks.prompts.prompt import Prompt, PromptError, PromptSet
from tasks.prompts.tokenise import AgentTokenizer, Tokenizer, tokenise, with_text_ids


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
    section: str = "",
) -> list[PromptRow]:
    """The rows at running positions first .. first + count - 1 of the prompt table.

    Args:
        prompts: The data set.
        tokenizer: The model's tokenizer, or an agent's.
        data: Order, and the limit of a prompt's length.
        first: The running position of the first row.
        count: The number of rows.
        context_length: The most tokens of prompt and completion.
        max_completion_length: The tokens of `context_length` that the completion needs.
        openings: For each prompt, the text that an environment adds, or an agent's first request; () without openings.
        section: The prefix of `sampling` in the configuration's paths, for messages.

    Raises:
        PromptError: A prompt does not fit; names the prompt.
    """
    if max_completion_length >= context_length:
        raise PromptError(
            f"{section}sampling.max_completion_length: value {max_completion_length}; allowed: less than the context "
            f"of the engine and the model ({context_length}), which also holds the prompt"
        )
    rows = []
    drawn = prompts_at(prompts, data, first, count)
    for number, prompt in enumerate(drawn if openings else with_text_ids(drawn, tokenizer)):
        opening = openings[number] if openings else None
        if opening is not None and isinstance(tokenizer, AgentTokenizer):
            # The row keeps the prompt, because the agent is begun with it again.
            messages, shown = tokenizer.of_opening(opening)
            asked, kept = replace(prompt, text_or_messages=messages), prompt.text_or_messages
        else:
            asked, shown = replace(prompt, text_or_messages=with_opening(prompt, opening)), tokenizer
            kept = asked.text_or_messages
        ids = tokenise(asked, shown, data, context_length, max_completion_length)
        rows.append(PromptRow(prompt.id, ids, kept, prompt.columns, opening))
    return rows


def check_embedded(rows: Sequence[PromptRow], vocab_size: int) -> None:
    """Raise PromptError for the first prompt with a token for which the model has no embedding."""
    for row in rows:
        check_tokens(row.prompt_id, max(row.token_ids), vocab_size)


def check_tokens(prompt_id: str, highest: int, vocab_size: int) -> None:
    """Raise PromptError if the model has no embedding for the `highest` token of a prompt or of its completion."""
    if highest >= vocab_size:
        raise PromptError(
            f"prompt {prompt_id!r} has the token {highest}, for which the model has no embedding; allowed: ids below "
            f"{vocab_size} (vocab_size in its config.json). The tokenizer is another model's, or tokens were added to "
            "it alone"
        )
