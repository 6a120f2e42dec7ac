"""Sources of prompts, written here and read through load_prompts as a run does."""

import json
from datetime import date
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.configuration.data import DataConfig
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import Prompt, PromptError

CHAT = [{"role": "user", "content": "What is 6 x 12?"}]


def verl_row(index: int | None, truth: str) -> dict[str, Any]:
    return {
        "data_source": "openai/gsm8k",
        "prompt": CHAT,
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": truth},
        "extra_info": {"index": index, "split": "train"},
    }


def write_lines(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def load(source: str, **settings: Any) -> list[Prompt]:
    return list(load_prompts(DataConfig(source=source, **settings)))


def test_trl_columns_of_both_kinds(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "2+2=", "answer": 4}, {"prompt": CHAT, "answer": 72}])
    prompts = load_prompts(DataConfig(source=source))
    assert prompts.columns == {"answer"}
    assert list(prompts) == [Prompt("0", "2+2=", {"answer": 4}), Prompt("1", CHAT, {"answer": 72})]


@pytest.mark.parametrize("write", [write_lines, write_parquet])
def test_verl_columns_need_no_conversion(tmp_path: Path, write: Any):
    suffix = "jsonl" if write is write_lines else "parquet"
    source = write(tmp_path / f"a.{suffix}", [verl_row(7, "72"), verl_row(5, "10")])
    prompts = load_prompts(DataConfig(source=source))
    assert prompts.columns == {"data_source", "ability", "reward_model", "extra_info", "ground_truth"}
    assert [prompt.id for prompt in prompts] == ["7", "5"]
    assert prompts[0].text_or_messages == CHAT
    assert prompts[0].columns["ground_truth"] == "72"
    assert prompts[0].columns["extra_info"] == {"index": 7, "split": "train"}
    assert prompts[0].columns["data_source"] == "openai/gsm8k"


@pytest.mark.parametrize("indices", [(3, 3), (0, None)])
def test_row_numbers_serve_where_verl_indices_do_not(tmp_path: Path, indices: tuple[int, int | None]):
    source = write_parquet(tmp_path / "a.parquet", [verl_row(index, "1") for index in indices])
    assert [prompt.id for prompt in load(source)] == ["0", "1"]


def test_gsm8k_as_published(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", [{"question": "How many?", "answer": "6*12=72\n#### 72"}])
    assert load(source, prompt_column="question") == [Prompt("0", "How many?", {"answer": "6*12=72\n#### 72"})]


def test_a_data_set_on_disk(tmp_path: Path):
    rows = datasets.Dataset.from_list(
        [{"prompt": CHAT, "answer": "72", "id": "x"}, {"prompt": CHAT, "answer": "1", "id": "y"}]
    )
    rows.save_to_disk(str(tmp_path / "single"))
    datasets.DatasetDict({"train": rows, "test": rows.select([1])}).save_to_disk(str(tmp_path / "dict"))
    assert load(str(tmp_path / "single"))[0] == Prompt("0", CHAT, {"answer": "72", "id": "x"})
    assert [prompt.columns["id"] for prompt in load(str(tmp_path / "dict"), split="test")] == ["y"]
    with pytest.raises(PromptError, match="split: value None; allowed: 'train', 'test'"):
        load(str(tmp_path / "dict"))
    with pytest.raises(PromptError, match="split: value 'train'; allowed: null"):
        load(str(tmp_path / "single"), split="train")


def test_another_directory_is_no_data_set(tmp_path: Path):
    with pytest.raises(PromptError, match=r"is not a directory written by datasets[.]save_to_disk"):
        load(str(tmp_path))


def test_parquet_cells_become_plain(tmp_path: Path):
    source = write_parquet(tmp_path / "a.parquet", [{"prompt": "x", "day": date(2024, 2, 29), "note": None}])
    assert load(source)[0].columns == {"day": "2024-02-29", "note": None}


def test_limit_keeps_the_first_rows_and_empty_lines_do_not_count(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('\ufeff{"prompt": "a"}\n\n  \n{"prompt": "b"}\n{"prompt": "c"}')
    assert [prompt.text_or_messages for prompt in load(str(path))] == ["a", "b", "c"]
    assert [prompt.text_or_messages for prompt in load(str(path), limit=2)] == ["a", "b"]
    assert len(load(str(path), limit=99)) == 3


def test_a_line_separator_inside_text_is_not_a_line_end(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a\u2028b"}\n', encoding="utf-8")
    assert load(str(path))[0].text_or_messages == "a\u2028b"


def test_the_generator_is_a_source():
    prompts = load_prompts(DataConfig(limit=4))
    assert len(prompts) == 4
    assert prompts.columns == {"answer", "worked"}


def test_columns_are_those_that_every_row_has(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a", "x": 1, "y": 2}, {"prompt": "b", "y": 3}])
    assert load_prompts(DataConfig(source=source)).columns == {"y"}


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        ("", {}, "has no rows"),
        ('{"prompt": "a"}\n{"prompt": ', {}, "a.jsonl: line 2 is not JSON"),
        ('{"prompt": "a"}\n[1]\n', {}, "a.jsonl: line 2 is list; allowed: a JSON object"),
        ('{"question": "a", "answer": 1}', {}, "line 1 has no column 'prompt'; there are: 'answer', 'question'"),
        ('{"prompt": "a"}\n\n{"q": "b"}', {}, "line 3 has no column 'prompt'; there are: 'q'"),
        ('{"prompt": "a"}\n{"prompt": 7}', {}, "line 2: the prompt is of type int"),
        (
            '{"prompt": "a"}\n{"prompt": "b\\ud83d"}',
            {},
            r"line 2: prompt: '\\ud83d' at character 1 is half of",
        ),
        (
            '{"prompt": "a", "x": {"y": ["\\udc00"]}}',
            {},
            r"line 1: x.y\[0\]: '\\udc00' at character 0 is half",
        ),
        ('{"prompt": "a", "\\ud83d": 1}', {}, r"a.jsonl: line 1: a column: '\\ud83d' at character 0 is half"),
        ('{"prompt": "a", "id": "\\ud83d"}', {}, r"a.jsonl: line 1: id: '\\ud83d' at character 0"),
        ('{"prompt": [{"role": "user", "content": "\\ud83d"}]}', {}, r"line 1: prompt\[0\].content: '\\ud83d' at"),
        ('{"prompt": "a", "x": %s}' % ("[" * 101 + "]" * 101), {}, r"line 1: x\[0\].*: nested more than 100"),
        ('{"prompt": "a", "x": %s}' % ("[" * 99_999), {}, r"a.jsonl: line 1 is nested too deep"),
        ('{"prompt": "a"}', {"split": "train"}, "split: value 'train'; allowed: null"),
        (
            '{"prompt": "a", "reward_model": {"ground_truth": 1}}\n{"prompt": "b", "reward_model": {}}',
            {},
            "prompt '1' of .* has no ground_truth",
        ),
    ],
)
def test_bad_files_are_refused_with_the_place(tmp_path: Path, text: str, settings: dict[str, Any], message: str):
    path = tmp_path / "a.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=message):
        load(str(path), **settings)


def test_rows_need_not_be_checked_twice(tmp_path: Path):
    source = write_lines(tmp_path / "a.jsonl", [{"prompt": "a"}, {"prompt": 7}])
    prompts = load_prompts(DataConfig(source=source), check_rows=False)
    assert prompts[0].text_or_messages == "a"
    with pytest.raises(PromptError, match="line 2"):
        prompts[1]
    with pytest.raises(IndexError, match="prompt 2 of 2"):
        prompts[2]


def test_files_that_are_not_there_or_not_what_they_seem(tmp_path: Path):
    with pytest.raises(PromptError, match=r"source: value '/no/such[.]jsonl'; allowed: 'arithmetic', or an existing"):
        load("/no/such.jsonl")
    (tmp_path / "a.txt").write_text("prompt\nx\n")
    with pytest.raises(PromptError, match=r"ends in '.txt'; allowed: .csv, .jsonl, .parquet, or a directory"):
        load(str(tmp_path / "a.txt"))
    (tmp_path / "a.parquet").write_text("prompt\nx\n")
    with pytest.raises(PromptError, match=r"a.parquet is not a readable Parquet file"):
        load(str(tmp_path / "a.parquet"))


def test_bytes_in_a_column_are_named(tmp_path: Path):
    source = write_parquet(tmp_path / "a.parquet", [{"prompt": "x", "image": b"png"}])
    with pytest.raises(PromptError, match="row 0: image: a value of type bytes is not JSON"):
        load(source)


def test_a_key_that_is_there_twice_is_named_with_its_line(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a", "extra": {"x": 1}}\n\n{"prompt": "a", "extra": [{"x": 1, "y": 2, "x": 1}]}\n')
    with pytest.raises(PromptError, match=r"a[.]jsonl: line 3: the key 'x' is there twice; allowed: once in an object"):
        load(str(path))
