from collections.abc import Mapping
from typing import Any

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tasks.configuration.data import DataConfig
from tasks.prompts.prompt import Prompt, PromptError
from tasks.prompts.tokenise import TEXTS_AT_ONCE, text_ids, tokenise, with_text_ids
from tests.tiny_model import tiny_tokenizer


class Letters:
    """One token per character; a chat is its contents and the opening of an answer."""

    def __call__(self, text: str) -> Mapping[str, Any]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(
        self,
        conversation: list[dict[str, Any]],
        *,
        add_generation_prompt: bool,
        tokenize: bool,
        return_dict: bool,
        **template_arguments: Any,
    ) -> Any:
        assert add_generation_prompt
        assert tokenize
        assert not return_dict
        assert not template_arguments
        if conversation[0]["role"] == "tool":
            raise ValueError("tools come later")
        return [ord(letter) for message in conversation for letter in message["content"]] + [62]


def run(content: Any, max_prompt_length: int | None = None, context_length: int = 100, completion: int = 10) -> Any:
    data = DataConfig(max_prompt_length=max_prompt_length)
    return tokenise(Prompt("p7", content, {}), Letters(), data, context_length, completion)


def test_text_is_tokenised_as_it_is():
    assert run("ab") == (97, 98)


def test_messages_go_through_the_template_with_the_opening_of_an_answer():
    assert run([{"role": "user", "content": "ab"}]) == (97, 98, 62)


def test_a_real_tokenizer_fits_the_protocol():
    core = Tokenizer(models.WordLevel({"[UNK]": 0, "user": 1, "hi": 2, "assistant": 3}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    chat = Prompt("0", [{"role": "user", "content": "hi"}], {})
    assert tokenise(chat, tokenizer, DataConfig(), 10, 1) == (1, 2, 3)
    assert tokenise(Prompt("0", "hi there", {}), tokenizer, DataConfig(), 10, 1) == (2, 0)


def test_limits_are_inclusive():
    assert len(run("abc", max_prompt_length=3)) == 3
    assert len(run("abc", context_length=13)) == 3


@pytest.mark.parametrize(
    ("content", "limits", "message"),
    [
        ("abcd", {"max_prompt_length": 3}, "prompt 'p7' has 4 tokens; allowed: 3 .data.max_prompt_length"),
        (
            "abcd",
            {"context_length": 13},
            "prompt 'p7' has 4 tokens; allowed: 3 .rollout.context_length 13 less sampling.max_completion",
        ),
        ("", {}, "prompt 'p7' has no tokens"),
        ([{"role": "tool", "content": "x"}], {}, "prompt 'p7': the chat template refused it: tools come later"),
    ],
)
def test_what_does_not_fit_is_refused_and_never_cut(content: Any, limits: dict[str, int], message: str):
    with pytest.raises(PromptError, match=message):
        run(content, **limits)


def test_without_a_chat_template_messages_are_refused_with_what_to_do():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"hi": 0}, unk_token="hi")))
    with pytest.raises(PromptError, match=r"policy\.path: the tokenizer has no chat template, and prompt 'p' is chat"):
        tokenise(Prompt("p", [{"role": "user", "content": "hi"}], {}), tokenizer, DataConfig(), 10, 1)
    assert tokenise(Prompt("p", "hi", {}), tokenizer, DataConfig(), 10, 1) == (0,)


def test_many_texts_have_the_ids_of_each_alone_and_messages_are_left_to_the_template():
    tokenizer = tiny_tokenizer()
    texts = [f"{number}+{'1' * (number % 5)}=" for number in range(TEXTS_AT_ONCE + 3)]
    assert list(text_ids(texts, tokenizer)) == [tuple(tokenizer(text)["input_ids"]) for text in texts]
    chat = Prompt("chat", [{"role": "user", "content": "1"}], {})
    given = Prompt("given", "1", {}, token_ids=(9, 9))
    alone = [Prompt(text, text, {}) for text in texts[:3]]
    mixed = with_text_ids([alone[0], chat, alone[1], given, alone[2]], tokenizer)
    assert [each.id for each in mixed] == [texts[0], "chat", texts[1], "given", texts[2]]
    assert [each.token_ids for each in mixed[::2]] == [tuple(tokenizer(text)["input_ids"]) for text in texts[:3]]
    assert (mixed[1], mixed[3]) == (chat, given)
