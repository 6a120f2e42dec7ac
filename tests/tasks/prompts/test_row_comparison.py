"""Prompts that are not what their rows say are refused or doubted, and those of known families are accepted."""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from tasks.configuration.data import DataConfig
from tasks.prompts.draw import draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.prompts.row_comparison import compare
from tests.chat_families import FAMILIES, MARKUP

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
USER = {"role": "user", "content": "  What is \"2 + 2\"?\n\n```\n  x = {'a': 1} & <b>\n```\n"}
SYSTEM = {"role": "system", "content": "Answer in French.\nBe brief."}
ANSWER = {"role": "assistant", "content": "<think>\nTwo and two...\n</think>\n\nIt is four."}
NEXT = {"role": "user", "content": "And 3 + 3?"}
TOOL = {"type": "function", "function": {"name": "look", "description": "d", "parameters": {"type": "object"}}}
WITH_TOOLS = "{% if tools %}{{ tools | tojson }}{% endif %}" + CHATML
WITH_CALLS = CHATML.replace(
    "{{ m.content }}",
    "{{ m.content }}{% for call in m.tool_calls or [] %}{{ call.function | tojson }}{% endfor %}",
)


def byte_tokenizer(
    template: str | None = CHATML, *, adds_bos: bool = False, strips: bool = False, **tokens: str
) -> Any:
    """One token per byte, and the markup of the families; strips: special tokens swallow the blanks after them."""
    core = Tokenizer(models.BPE({letter: i for i, letter in enumerate(pre_tokenizers.ByteLevel.alphabet())}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(text, rstrip=strips, normalized=False) for text in MARKUP])
    if adds_bos:
        core.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", core.token_to_id("<s>"))]
        )
    made = PreTrainedTokenizerFast(tokenizer_object=core, **{"bos_token": "<s>", "eos_token": "<|im_end|>"} | tokens)
    made.chat_template = template
    return made


@pytest.fixture
def look(tmp_path):
    """A function that compares rows, or a file of them, with their prompts; it returns the doubts."""

    def looked(rows: Any, tokenizer: Any, *, stops: tuple[int, ...] = (), **settings: Any) -> list[str]:
        source = rows
        if isinstance(rows, list):
            source = tmp_path / "rows.jsonl"
            source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = DataConfig(source=str(source), **settings)
        prompts = load_prompts(data)
        sizes = {"first": 0, "count": len(prompts), "context_length": 10_000, "max_completion_length": 1}
        drawn = draw_prompts(prompts, tokenizer, data, **sizes)
        return compare(drawn, prompts, tokenizer, tokenizer, data, stops)

    return looked


@pytest.mark.parametrize("strips", [False, True])
@pytest.mark.parametrize("messages", [[USER], [SYSTEM, USER], [USER, ANSWER, NEXT], [SYSTEM, USER, ANSWER, NEXT]])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_templates_of_known_families_are_accepted(look, family, messages, strips):
    assert look([{"prompt": messages}], byte_tokenizer(FAMILIES[family], strips=strips)) == []


@pytest.mark.parametrize("nothing", [None, "", "[]", "null", []])
def test_columns_that_hold_nothing_are_no_tools_and_no_arguments(look, nothing):
    arguments = {} if nothing == [] else None if nothing in ("", "[]") else nothing
    assert look([{"prompt": [USER], "tools": nothing, "chat_template_kwargs": arguments}], byte_tokenizer()) == []


def test_a_switch_that_a_template_removes_is_no_dropped_text(look):
    messages = [{"role": "system", "content": "Be brief. /no_think"}, USER]
    assert look([{"prompt": messages}], byte_tokenizer(FAMILIES["smollm3"])) == []


def test_results_that_a_template_escapes_are_found(look):
    result = {"role": "tool", "content": '{"found": "a \\"b\\"\n"}'}
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
    template = FAMILIES["llama3"].replace("m.content | trim", "(m.content or m.tool_calls | tojson) | trim")
    assert look([{"prompt": [USER, call, result]}], byte_tokenizer(template)) == []


def without(role: str) -> str:
    return CHATML.replace("{% for m in messages %}", f"{{% for m in messages if m.role != '{role}' %}}")


JSON_MESSAGES = json.dumps([USER])
STOPS_TURN = CHATML.replace("<|im_start|>assistant\n", "<|im_start|>assistant<|im_end|>")
# rows, tokenizer, kind, a part of the line, and whether it is certain
DIFFERENCES: list[tuple[list[Any], Any, str, str, bool]] = [
    ([{"prompt": "<s>hi"}], byte_tokenizer(adds_bos=True), "two_bos", "two BOS tokens", True),
    ([{"prompt": [USER]}], byte_tokenizer("{{ bos_token }}<s>" + CHATML), "two_bos", "two BOS tokens", True),
    ([{"prompt": "hi<|im_end|>"}], byte_tokenizer(), "stop_token_at_end", "ends a response", True),
    ([{"prompt": "hi<|im_end|>\n"}], byte_tokenizer(), "stop_token_at_end", "ends a response", True),
    ([{"prompt": [USER]}], byte_tokenizer(STOPS_TURN), "stop_token_at_end", "ends a response", True),
    ([{"prompt": [USER, ANSWER]}], byte_tokenizer(), "assistant_last", "the last message is the assistant's", True),
    (
        [{"prompt": [USER]}],
        byte_tokenizer(CHATML.partition("{% if add")[0]),
        "no_generation_prompt",
        "adds no generation prompt",
        True,
    ),
    (
        [{"prompt": [SYSTEM, USER]}],
        byte_tokenizer(without("system")),
        "dropped_message",
        "message 0 (role system)",
        False,
    ),
    (
        [{"prompt": [{"role": "developer", "content": "2 + 2"}, USER]}],
        byte_tokenizer(without("developer")),
        "dropped_message",
        "message 0 (role developer)",
        False,
    ),
    (
        [{"prompt": [SYSTEM, USER]}],
        byte_tokenizer(
            CHATML.replace("m.content }}", "m.content if m.content != messages[-1].content or loop.length == 1 }}")
        ),
        "dropped_message",
        "message 1 (role user)",
        True,
    ),
    (
        [{"prompt": [USER, {"role": "assistant", "tool_calls": [{"function": {"name": "look"}}]}, NEXT]}],
        byte_tokenizer(),
        "dropped_message",
        "message 1 calls 'look'",
        False,
    ),
    ([{"prompt": JSON_MESSAGES}], byte_tokenizer(), "json_as_text", "text that holds chat messages", True),
    ([{"prompt": repr([USER])}], byte_tokenizer(), "json_as_text", "text that holds chat messages", True),
    ([{"prompt": json.dumps(USER)}], byte_tokenizer(), "json_as_text", "text that holds chat messages", True),
    ([{"prompt": json.dumps({"messages": [USER]})}], byte_tokenizer(), "json_as_text", "holds chat messages", True),
    (
        [{"prompt": [{"role": "user", "content": JSON_MESSAGES}]}],
        byte_tokenizer(),
        "json_as_text",
        "the content of a message is text",
        False,
    ),
    ([{"prompt": "hi", "extra_info": '{"index": 3}'}], byte_tokenizer(), "json_as_text", "extra_info is text", False),
    (
        [
            {
                "prompt": [
                    USER,
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": '{"a": 1}'}}]},
                    NEXT,
                ]
            }
        ],
        byte_tokenizer(WITH_CALLS),
        "json_as_text",
        "JSON in JSON",
        False,
    ),
    (
        [{"prompt": [USER], "tools": [TOOL]}],
        byte_tokenizer(),
        "unread_arguments",
        "the tool 'look' of the column",
        False,
    ),
    (
        [{"prompt": [USER], "tools": ["look"]}],
        byte_tokenizer(WITH_TOOLS),
        "unread_arguments",
        "the column tools",
        False,
    ),
    (
        [{"prompt": "hi", "tools": [TOOL]}],
        byte_tokenizer(),
        "unread_arguments",
        "the prompt is text, so the column",
        False,
    ),
    (
        [{"prompt": [USER], "chat_template_kwargs": {"enable_thinkng": False}}],
        byte_tokenizer(FAMILIES["qwen3"]),
        "unread_arguments",
        "'enable_thinkng', which the chat template does not read",
        False,
    ),
    (
        [{"prompt": "hi", "chat_template_kwargs": {"a": False}}],
        byte_tokenizer(),
        "unread_arguments",
        "the prompt is text, so chat_template_kwargs",
        False,
    ),
]


@pytest.mark.parametrize(
    ("rows", "tokenizer", "kind", "part", "certain"),
    DIFFERENCES,
    ids=[f"{n}-{row[2]}" for n, row in enumerate(DIFFERENCES)],
)
def test_a_difference_is_refused_or_doubted_with_its_row_unless_it_is_allowed(
    look, tmp_path, rows, tokenizer, kind, part, certain
):
    if kind not in ("no_generation_prompt", "stop_token_at_end") and not str(tokenizer.chat_template).startswith(
        "{{ bos"
    ):
        fine = "fine" if isinstance(rows[0]["prompt"], str) else [NEXT]
        rows = [{"prompt": fine}, *rows]
    where = f"data.source: 1 of {len(rows)} rows, the first is {tmp_path / 'rows.jsonl'}: line {len(rows)}: "
    if certain:
        with pytest.raises(PromptError) as caught:
            look(rows, tokenizer)
        lines = str(caught.value).split("; data.source")
    else:
        lines = look(rows, tokenizer)
    [line] = lines
    assert line.startswith(where)
    assert part in line
    assert line.endswith(f", or data.allow: [{kind}]")
    assert "\n" not in line
    assert look(rows, tokenizer, allow=(kind,)) == []


def test_the_number_of_rows_and_the_first_in_the_order_of_the_run_are_named(look, tmp_path):
    rows = [{"prompt": [USER]}, *({"prompt": [SYSTEM, USER]} for _ in range(5))]
    [line] = look(rows, byte_tokenizer(without("system")), shuffle=False)
    assert line.startswith(f"data.source: 5 of 6 rows, the first is {tmp_path / 'rows.jsonl'}: line 2: message 0 (role")


def test_all_that_is_certain_is_said_in_one_line(look):
    with pytest.raises(PromptError, match=r"two BOS tokens.*; data\.source: 1 of 1 rows.*ends a response") as caught:
        look([{"prompt": "<s>hi<|im_end|>"}], byte_tokenizer(adds_bos=True))
    assert "\n" not in str(caught.value)


def test_a_last_message_by_the_assistant_is_continued_if_that_is_asked_for(look):
    rows = [{"prompt": [USER, {"role": "assistant", "content": "It is"}]}, {"prompt": [USER]}]
    assert look(rows, byte_tokenizer(), continue_final_message=True) == []


def test_the_stop_tokens_of_the_model_count_too(look):
    tokenizer = byte_tokenizer()
    stop = tokenizer.convert_tokens_to_ids("<|endoftext|>")
    assert look([{"prompt": "hi<|endoftext|>"}], tokenizer) == []
    with pytest.raises(PromptError, match="ends a response"):
        look([{"prompt": "hi<|endoftext|>"}], tokenizer, stops=(stop,))


def test_a_default_system_prompt_is_not_the_rows_own(look):
    template = "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n" + without("system")
    [line] = look(
        [{"prompt": [{"role": "system", "content": "You are a helpful pirate."}, USER]}], byte_tokenizer(template)
    )
    assert "message 0 (role system)" in line


def metaspace(**fields: Any) -> Any:
    """A tokenizer in the way of Llama 2: blanks are a letter, one stands in front, and unknown letters are bytes."""
    letters = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"abcdefghijklmnopqrstuvwxyz0123456789+?="]
    vocabulary = {"<unk>": 0, **{letter: 1 + i for i, letter in enumerate(letters)}}
    core = Tokenizer(models.BPE(vocabulary, [], unk_token="<unk>", byte_fallback=True))
    core.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    core.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>", **fields)


def composing() -> Any:
    """A tokenizer that composes accents, as Qwen's does."""
    made = byte_tokenizer(None)
    made.backend_tokenizer.normalizer = normalizers.NFC()
    return made


@pytest.mark.parametrize("make", [metaspace, composing, lambda: byte_tokenizer(None, adds_bos=True)])
@pytest.mark.parametrize(
    "text", ["2+2=?", "  two blanks", "tabs\tand\n\nlines\n", "e\u0301 \u00e9 \u4f60 \U0001f600", "A\u00a0B"]
)
def test_what_a_tokenizer_does_without_harm_is_accepted(look, make, text):
    assert look([{"prompt": text}], make()) == []


def words(text: str) -> Any:
    """A tokenizer that knows some letters alone, and of blanks nothing."""
    core = Tokenizer(
        models.WordLevel({"<unk>": 0, **{letter: 1 + i for i, letter in enumerate(text)}}, unk_token="<unk>")
    )
    core.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Whitespace(), pre_tokenizers.Split("", "isolated")])
    core.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="<unk>")


def lower() -> Any:
    made = byte_tokenizer(None)
    made.backend_tokenizer.normalizer = normalizers.Lowercase()
    return made


def compatible() -> Any:
    made = byte_tokenizer(None)
    made.backend_tokenizer.normalizer = normalizers.NFKC()
    return made


@pytest.mark.parametrize(
    ("tokenizer", "text", "lost"),
    [
        (words("ab"), "ac\u00df", "drops or changes 'c', '\u00df'"),
        (words("ab"), "a b", "drops or changes ' '"),
        (lower(), "aBc", "drops or changes 'B'"),
        (compatible(), "x\u00b2", "drops or changes '\u00b2'"),
        (words("ab"), "ba\nab", "drops or changes '\\n'"),
    ],
)
def test_characters_that_a_tokenizer_loses_are_named(look, tokenizer, text, lost):
    [line] = look([{"prompt": text}], tokenizer)
    assert lost in line
    assert look([{"prompt": text}], tokenizer, allow=("dropped_characters",)) == []


def test_markup_that_a_tokenizer_does_not_know_is_lost_too(look):
    tokenizer = words("userhia")
    tokenizer.chat_template = CHATML.replace("\n", "")
    [line] = look([{"prompt": [{"role": "user", "content": "hi"}]}], tokenizer)
    assert "drops or changes '|'" in line


def test_what_the_tokenizer_drops_is_not_laid_to_the_template(look):
    tokenizer = words("userasitnhm<|_>_\\")
    tokenizer.chat_template = CHATML.replace("\n", "")
    lines = look([{"prompt": [{"role": "user", "content": "hi \u00df"}]}], tokenizer)
    assert [line.rpartition("allow: ")[2] for line in lines] == ["[dropped_characters]"]


def test_parquet_and_json_lines_are_looked_at_alike(look, tmp_path):
    rows = [{"prompt": [SYSTEM, USER], "tools": [TOOL]}, {"prompt": [USER, ANSWER, NEXT], "tools": None}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    found = [look(source, byte_tokenizer(without("system"))) for source in (rows, tmp_path / "rows.parquet")]
    lines, table = ([line.replace("rows.jsonl: line 1", "rows.parquet: row 0") for line in each] for each in found)
    assert lines == table
    assert len(lines) == 2
