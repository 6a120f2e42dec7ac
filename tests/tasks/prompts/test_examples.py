"""Examples of a data set: which tokens are the prompt, which are learned, and which rows are refused."""

import json

import pytest

from storage.records.prompt_table import PromptRow
from tasks.configuration.data import DataConfig
from tasks.prompts.examples import COMPLETION, completions_of
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.prompts.tokenise import tokenise
from tests.chat_tokenizers import CHATML, GEMMA, QWEN, chat_tokenizer
from tests.tiny_model import tiny_tokenizer

LONG = 1000
SYSTEM, ASKS, SAYS, ASKS_ON, SAYS_ON = (
    {"role": role, "content": content}
    for role, content in [
        ("system", "be brief"),
        ("user", "1+1?"),
        ("assistant", "2"),
        ("user", "and 2+2?"),
        ("assistant", "4, of course"),
    ]
)
CALL = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add", "arguments": {"a": "1"}}}]}
RESULT = {"role": "tool", "name": "add", "content": "2"}
# Earlier turns lose their thoughts, as in Qwen3's template.
FORGETS = CHATML.replace("{{ m.content }}", "{{ m.content if loop.last else m.content[:1] }}")


def examples(folder, *rows, **settings):
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = DataConfig(source=str(file), **settings)
    return load_prompts(config, kind="sft"), config


def tokenised(folder, row, tokenizer, length_max=LONG, **settings):
    """The prompt's tokens, and the stretches of the completion."""
    prompts, config = examples(folder, row, **settings)
    prompt = prompts[0]
    ids = tokenise(prompt, tokenizer, config, 1 << 20, 1)
    row = PromptRow(prompt.id, ids, prompt.text_or_messages, prompt.columns)
    [[stretches]] = completions_of([row], tokenizer, config, length_max)
    return ids, stretches


def texts(tokenizer, stretches):
    return [(tokenizer.decode(stretch.token_ids), stretch.is_learned) for stretch in stretches]


def test_text_is_the_prompt_then_the_completion_and_the_end(tmp_path):
    tokenizer = tiny_tokenizer()
    ids, [stretch] = tokenised(tmp_path, {"prompt": "1+1=", "completion": "2"}, tokenizer)
    assert stretch.is_learned
    assert [*ids, *stretch.token_ids] == [*tokenizer("1+1=2")["input_ids"], tokenizer.eos_token_id]
    assert tokenizer.decode(ids) == "1+1="


def test_a_completion_that_has_its_end_gets_no_second_one(tmp_path):
    tokenizer = tiny_tokenizer()
    _, [stretch] = tokenised(tmp_path, {"prompt": "1+1=", "completion": "2<eos>"}, tokenizer)
    assert stretch.token_ids.count(tokenizer.eos_token_id) == 1


def test_the_generator_has_completions_in_its_column_of_worked_answers():
    prompts = load_prompts(DataConfig(limit=3, completion_column="worked"), kind="sft")
    assert [prompt.columns[COMPLETION].endswith(prompt.columns["answer"]) for prompt in prompts] == [True] * 3
    assert prompts.columns == {"answer", COMPLETION}


@pytest.mark.parametrize("template", [CHATML, QWEN])
def test_of_a_pair_of_messages_the_assistants_turn_is_learned_with_its_end(tmp_path, template):
    tokenizer = chat_tokenizer(template)
    ids, stretches = tokenised(tmp_path, {"prompt": [SYSTEM, ASKS], "completion": [SAYS]}, tokenizer)
    whole = tokenizer.apply_chat_template([SYSTEM, ASKS, SAYS], tokenize=True, return_dict=False)
    assert [*ids, *stretches[0].token_ids] == whole
    assert texts(tokenizer, stretches) == [("2<|im_end|>\n", True)]
    assert tokenizer.decode(ids).endswith("<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("row", "settings"),
    [
        ({"prompt": [SYSTEM, ASKS], "completion": [SAYS, ASKS_ON, SAYS_ON]}, {}),
        (
            {"messages": [SYSTEM, ASKS, SAYS, ASKS_ON, SAYS_ON]},
            {"prompt_column": "messages", "completion_column": None},
        ),
        (
            {"turns": [SYSTEM, ASKS, SAYS, ASKS_ON, SAYS_ON, ASKS]},
            {"prompt_column": "turns", "completion_column": None},
        ),
    ],
)
def test_of_several_turns_those_of_the_assistant_alone_are_learned(tmp_path, row, settings):
    tokenizer = chat_tokenizer(CHATML)
    ids, stretches = tokenised(tmp_path, row, tokenizer, **settings)
    assert texts(tokenizer, stretches) == [
        ("2<|im_end|>\n", True),
        ("<|im_start|>user\nand 2+2?<|im_end|>\n<|im_start|>assistant\n", False),
        ("4, of course<|im_end|>\n", True),
    ]
    spread = [token for stretch in stretches for token in stretch.token_ids]
    rows = [SYSTEM, ASKS, SAYS, ASKS_ON, SAYS_ON]
    assert [*ids, *spread] == tokenizer.apply_chat_template(rows, tokenize=True, return_dict=False)


def test_a_tools_result_is_read_and_the_call_is_learned(tmp_path):
    tokenizer = chat_tokenizer(QWEN)
    row = {"prompt": [ASKS], "completion": [CALL, RESULT, SAYS]}
    _, stretches = tokenised(tmp_path, row, tokenizer)
    (call, is_call), (result, is_result), (said, is_said) = texts(tokenizer, stretches)
    assert (is_call, is_result, is_said) == (True, False, True)
    assert '"name": "add"' in call
    assert "<tool_response>\n2\n</tool_response>" in result
    assert said == "2<|im_end|>\n"


@pytest.mark.parametrize(
    ("row", "settings", "message"),
    [
        ({"prompt": "1+1="}, {}, r"^data.completion_column: value 'completion'; allowed: a column of every row"),
        ({"prompt": "1+1=", "completion": [SAYS]}, {}, "the prompt is text, the completion messages; allowed: both"),
        ({"prompt": "1+1=", "completion": ""}, {}, "column 'completion': the completion is empty text"),
        ({"prompt": "1+1=", "completion": 2}, {}, "column 'completion': the completion is of type int; allowed: text"),
        ({"prompt": [ASKS], "completion": [ASKS]}, {}, "begins with a message by 'user'; allowed: 'assistant'"),
        ({"prompt": [ASKS]}, {"completion_column": None}, "without a message by the assistant; allowed: one or more"),
        ({"prompt": [SAYS]}, {"completion_column": None}, "without a message before the first by the assistant"),
        ({"prompt": "1+1=2"}, {"completion_column": None}, "it is text; allowed with data.completion_column null"),
    ],
)
def test_a_row_that_is_no_example_is_refused_by_its_line(tmp_path, row, settings, message):
    with pytest.raises(PromptError, match=message) as caught:
        examples(tmp_path, row, **settings)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("data.completion_column") or "rows.jsonl: line 1" in str(caught.value)


@pytest.mark.parametrize(
    ("template", "row", "length_max", "message"),
    [
        (CHATML, {"prompt": [ASKS], "completion": [SAYS_ON]}, 3, "has a completion of [0-9]+ tokens; allowed: 3 "),
        (FORGETS, {"prompt": [ASKS], "completion": [SAYS, ASKS_ON, SAYS_ON]}, LONG, "the tokens before it change"),
        (GEMMA, {"prompt": [ASKS], "completion": [CALL | {"tool_calls": []}, RESULT, SAYS]}, LONG, None),
    ],
)
def test_a_completion_that_cannot_be_told_from_its_prompt_is_refused(tmp_path, template, row, length_max, message):
    if message is None:
        _, stretches = tokenised(tmp_path, row, chat_tokenizer(template), length_max)
        assert [stretch.is_learned for stretch in stretches] == [True, False, True]
        return
    with pytest.raises(PromptError, match=message):
        tokenised(tmp_path, row, chat_tokenizer(template), length_max)


def rows_of(folder, tokenizer, *examples_of_rows):
    prompts, config = examples(folder, *examples_of_rows)
    named = [(prompt, tokenise(prompt, tokenizer, config, 1 << 20, 1)) for prompt in prompts]
    return [PromptRow(each.id, ids, each.text_or_messages, each.columns) for each, ids in named], config


def test_texts_beside_messages_keep_their_own_completions(tmp_path):
    tokenizer = chat_tokenizer(CHATML)
    rows, config = rows_of(
        tmp_path,
        tokenizer,
        {"prompt": "1+1=", "completion": "2"},
        {"prompt": [ASKS], "completion": [SAYS]},
        {"prompt": "2+2+2=", "completion": "six"},
    )
    found = [stretches for [stretches] in completions_of(rows, tokenizer, config, LONG)]
    assert [texts(tokenizer, stretches)[0][0] for stretches in found] == [
        "2<|im_end|>",
        "2<|im_end|>\n",
        "six<|im_end|>",
    ]
    assert found == [next(completions_of([row], tokenizer, config, LONG))[0] for row in rows]


def test_the_first_row_that_does_not_fit_is_named(tmp_path):
    tokenizer = tiny_tokenizer()
    rows, config = rows_of(tmp_path, tokenizer, *({"prompt": "1=", "completion": "1" * n} for n in (3, 4, 8)))
    made = completions_of(rows, tokenizer, config, 4)
    assert len(next(made)[0][0].token_ids) == 4
    with pytest.raises(PromptError, match=f"prompt '{rows[1].prompt_id}' has a completion of 5 tokens"):
        next(made)
