"""Completions whose learned tokens are not what their rows say are doubted, and others are accepted."""

import json
from functools import partial

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from storage.records.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.completion_comparison import compare_completions
from tasks.prompts.examples import COMPLETIONS, completions_of
from tasks.prompts.loading import load_prompts
from tasks.prompts.row_comparison import place_of
from tasks.prompts.tokenise import tokenise
from tests.chat_families import FAMILIES
from tests.chat_tokenizers import CHATML, QWEN, chat_tokenizer
from tests.tiny_model import tiny_tokenizer

ASKS = {"role": "user", "content": "1+1?"}
CALLS = [{"type": "function", "function": {"name": "plus", "arguments": {"a": "1"}}}]
CALLING = {"role": "assistant", "content": "Let me add.", "tool_calls": CALLS}
RESULT = {"role": "tool", "name": "plus", "content": "2"}
SAYS = {"role": "assistant", "content": "<think>\nOne and one.\n</think>\n\nTwo."}
# It shows calls or a content, as some templates do.
EITHER = QWEN.replace("{% if m.content %}{{ '\n' + m.content }}{% endif %}", "")
FORGETS_THOUGHTS = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] }}")
READS_THOUGHTS = CHATML.replace("{{ m.content }}", "{{ m.thinking or '' }}{{ m.content }}")


def doubts(folder, tokenizer, *rows, kind="sft", **settings):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(source=str(file), shuffle=False, **settings)
    prompts = load_prompts(data, kind=kind)
    made = [
        PromptRow(each.id, tokenise(each, tokenizer, data, 1 << 20, 1), each.text_or_messages, each.columns)
        for each in prompts
    ]
    columns = COMPLETIONS[kind]
    found = zip(made, completions_of(made, tokenizer, data, 1 << 20, columns), strict=True)
    place = partial(place_of, prompts, data)
    return compare_completions(found, columns, len(made), place, tokenizer=tokenizer, data=data)


def test_characters_that_the_tokenizer_lacks_are_named_with_their_line(tmp_path):
    rows = [{"prompt": "1+1=", "completion": said} for said in ("2", "漢字", "2漢")]
    [line] = doubts(tmp_path, tiny_tokenizer(), *rows)
    assert line.startswith("data.source: 2 of 3 rows, the first is ")
    assert "rows.jsonl: line 2: the tokens of the completion stand for another text, because the tokenizer" in line
    assert line.endswith(
        "drops or changes '漢', '字'; expected: texts of which the tokenizer keeps all, or data.allow: "
        "[dropped_characters]"
    )
    assert doubts(tmp_path, tiny_tokenizer(), *rows, allow=("dropped_characters",)) == []


@pytest.mark.parametrize("wrong", ["chosen", "rejected"])
def test_of_a_pair_each_completion_is_compared(tmp_path, wrong):
    row = {"prompt": "1+1=", "chosen": "2", "rejected": "3"}
    assert doubts(tmp_path, tiny_tokenizer(), row, kind="dpo") == []
    [line] = doubts(tmp_path, tiny_tokenizer(), row | {wrong: "漢"}, kind="dpo")
    assert f"the tokens of the {wrong} completion stand for another text" in line


@pytest.mark.parametrize(
    ("template", "completion", "detail"),
    [
        (EITHER, [CALLING, RESULT, SAYS], "the content of message 0 of the completion is not learned as it is written"),
        (CHATML, [CALLING, RESULT, SAYS], "message 0 of the completion calls 'plus', which is not learned"),
        (FORGETS_THOUGHTS, [SAYS], "the content of message 0 of the completion is not learned as it is written"),
        (CHATML, [SAYS | {"thinking": "One, one."}], "the thinking of message 0 of the completion is not learned"),
        (QWEN, [CALLING, RESULT, SAYS], None),
        (CHATML, [SAYS, ASKS, SAYS], None),
        (READS_THOUGHTS, [SAYS | {"thinking": "One, one."}], None),
        (CHATML, [{"role": "assistant", "content": "漢字\n  and   blanks \n"}], None),
    ],
)
def test_what_the_template_drops_of_a_learned_message_is_doubted(tmp_path, template, completion, detail):
    found = doubts(tmp_path, chat_tokenizer(template), {"prompt": [ASKS], "completion": completion})
    if detail is None:
        assert found == []
        return
    [line] = found
    assert detail in line
    assert line.endswith("expected: messages that the chat template shows, or data.allow: [dropped_message]")


def test_of_a_message_the_tokenizers_losses_are_told_from_the_templates(tmp_path):
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    core.normalizer = normalizers.Lowercase()
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    lowers = PreTrainedTokenizerFast(tokenizer_object=core, eos_token="<|im_end|>")
    lowers.add_tokens(["<|im_start|>"], special_tokens=True)
    lowers.chat_template = EITHER
    row = {"prompt": [ASKS], "completion": [{"role": "assistant", "content": "Two."}]}
    [line] = doubts(tmp_path, lowers, row)
    assert "the tokenizer drops or changes 'T'; expected" in line


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_in_the_manner_of_known_families_are_accepted(tmp_path, family):
    row = {"prompt": [ASKS], "completion": [{"role": "assistant", "content": 'It is {"four"} & <b>.\n\n```\n  x\n```'}]}
    assert doubts(tmp_path, chat_tokenizer(FAMILIES[family]), row) == []
