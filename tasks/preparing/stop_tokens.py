"""Where a response ends: the stop tokens of a run, from the files of its model.

Text ends at the tokens named in config.json and generation_config.json. In a chat, a turn also ends at the tokenizer's
eos_token, and at the token with which the chat template ends a turn of the assistant. A run keeps the stop tokens of
its first plan.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.records.prompt_table import PromptRow
from storage.records.run import read_plan
from storage.stores.store import ObjectMissing, ObjectStore
from tasks.configuration.run_config import RunConfig
from tasks.learning.pretrained import ModelError, stop_token_ids, vocabulary_size
from tasks.preparing.special_tokens import is_dropped, special_ids, unseen_by_rewards
from tasks.prompts.prompt import Message, Prompt

# Digits, which every tokenizer has.
_SAID, _NEXT = "7310946582", "4659028137"
_FILES = "eos_token_id in config.json and generation_config.json"


@dataclass(frozen=True)
class StopTokens:
    """The stop tokens of a model.

    Attributes:
        ids: Token ids, ascending.
        texts: The text of each id.
        doubts: Disagreements of the model's files.
    """

    ids: tuple[int, ...]
    texts: tuple[str, ...]
    doubts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _TurnEnd:
    """The special tokens after an assistant's message. is_one_token: a single token, certainly the end of the turn."""

    ids: tuple[int, ...] = ()
    is_one_token: bool = False


def find_stop_tokens(model_dir: Path, tokenizer: Any, *, in_chat: bool) -> StopTokens:
    """The stop tokens of a model, for prompts of messages or of text.

    tokenizer: a tokenizer of transformers. Raises ModelError if the files name no valid stop token.
    """
    named = stop_token_ids(model_dir)
    found, doubts = set(named), []
    own, known = tokenizer.eos_token_id, f"{_FILES}: {_as_text(tokenizer, named)}"
    if own is not None and own not in found:
        ends = "responses end at each of them" if in_chat else "prompts are text, so responses end at the latter alone"
        doubts.append(f"the tokenizer's eos_token is {_as_text(tokenizer, [own])}, which is not among {known}; {ends}")
        if in_chat:
            found.add(int(own))
    turn = _end_of_turn(tokenizer) if in_chat else _TurnEnd()
    if turn.ids and not found.intersection(turn.ids):
        ends = "responses end at it, too"
        if turn.is_one_token and is_dropped(tokenizer, turn.ids[0]):
            found.update(turn.ids)
        else:
            ends = (
                f"responses end at {_as_text(tokenizer, sorted(found))} alone; allowed: eos_token_id of the turn's end"
            )
        doubts.append(
            f"the chat template ends a turn of the assistant with {_as_text(tokenizer, turn.ids)}, which is neither "
            f"the tokenizer's eos_token nor among {known}; {ends}"
        )
    ids = tuple(sorted(found))
    doubts += _doubt_text_tokens(tokenizer, ids)
    texts = tuple(_as_text(tokenizer, [each]) for each in ids)
    return StopTokens(ids, texts, tuple(f"policy.path: {doubt}" for doubt in doubts))


def checked_stop_tokens(
    model_dir: Path, tokenizer: Any, prompts: Iterable[Prompt | PromptRow], *, with_turns: bool
) -> StopTokens:
    """The stop tokens with which a new run of `prompts` begins; raises ModelError."""
    stops = find_stop_tokens(model_dir, tokenizer, in_chat=with_turns or any(map(_is_chat, prompts)))
    vocab_size = vocabulary_size(model_dir)
    for each, text in zip(stops.ids, stops.texts, strict=True):
        if each >= vocab_size:
            raise ModelError(
                f"policy.path: the stop token {text} of the tokenizer cannot be sampled; allowed: ids below vocab_size "
                f"({vocab_size})"
            )
    return stops


def look_at_responses(
    config: RunConfig, model_dir: Path, tokenizer: Any, prompts: Iterable[Prompt | PromptRow]
) -> tuple[str, list[str]]:
    """A line about the stop tokens of a new run, and doubts about the stop tokens and the texts that rewards see.

    Raises ModelError.
    """
    stops = checked_stop_tokens(model_dir, tokenizer, prompts, with_turns=config.turns is not None)
    return f"stop tokens: {', '.join(stops.texts)}", [*stops.doubts, *unseen_by_rewards(config, tokenizer)]


def stop_ids_of_run(
    run: ObjectStore, model_dir: Path, tokenizer: Any, prompts: Iterable[Prompt | PromptRow], *, with_turns: bool
) -> tuple[int, ...]:
    """The stop tokens in the run's first plan; without a plan, the stop tokens for `prompts`."""
    try:
        return read_plan(run, 0).sampling.stop_token_ids
    except ObjectMissing:
        return checked_stop_tokens(model_dir, tokenizer, prompts, with_turns=with_turns).ids


def _end_of_turn(tokenizer: Any) -> _TurnEnd:
    """The special tokens with which the chat template ends a turn; none if unknown."""
    spoken: list[Message] = [{"role": "user", "content": "dummy"}, {"role": "assistant", "content": _SAID}]
    last = _specials_after(tokenizer, spoken)
    # Some templates end a turn only before a further message: the end then cannot be told from the next beginning.
    ids = last or _specials_after(tokenizer, [*spoken, {"role": "user", "content": _NEXT}])
    return _TurnEnd(ids, is_one_token=len(last) == 1)


def _specials_after(tokenizer: Any, messages: Sequence[Message]) -> tuple[int, ...]:
    """The distinct special tokens between the assistant's text and the next message's, in order."""
    try:
        text = str(tokenizer.apply_chat_template(list(messages), tokenize=False))
        after = text.partition(_SAID)[2].partition(_NEXT)[0]
        ids = tokenizer(after, add_special_tokens=False)["input_ids"]
    except Exception:  # noqa: BLE001 - a template is a program of the model's author and may raise anything
        return ()
    special = special_ids(tokenizer)
    return tuple(dict.fromkeys(int(each) for each in ids if int(each) in special))


def _doubt_text_tokens(tokenizer: Any, ids: Sequence[int]) -> Iterator[str]:
    for each in ids:
        text = str(tokenizer.decode([each], skip_special_tokens=False))
        if text.strip() and each != tokenizer.eos_token_id and not is_dropped(tokenizer, each):
            yield (
                f"{_FILES} name {_as_text(tokenizer, [each])}, which is text to the tokenizer; responses end "
                "wherever the policy writes it"
            )


def _is_chat(prompt: Prompt | PromptRow) -> bool:
    content = prompt.prompt if isinstance(prompt, PromptRow) else prompt.text_or_messages
    return not isinstance(content, str)


def _as_text(tokenizer: Any, ids: Iterable[int]) -> str:
    """Tokens as people read them."""
    return ", ".join(f"{str(tokenizer.decode([each], skip_special_tokens=False))!r} ({each})" for each in ids)
