"""CSV files as prompts: the values that `datasets` reads, the lines of errors, and what is doubted or refused."""

import csv
import io
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.configuration.data import DataConfig
from tasks.prompts.csv_rows import CsvRows
from tasks.prompts.loading import doubts_of, load_prompts
from tasks.prompts.prompt import PromptError


def written(folder: Path, body: str | bytes) -> Path:
    file = folder / "rows.csv"
    file.write_bytes(body if isinstance(body, bytes) else body.encode())
    return file


def rows_of(folder: Path, body: str) -> list[dict[str, Any]]:
    rows = CsvRows(written(folder, body))
    return [dict(rows.row(index)) for index in range(len(rows))]


def test_a_csv_file_is_a_source_of_prompts(tmp_path: Path):
    source = written(tmp_path, 'uid,prompt,answer\na,"2 + 2,\nplease",4\nb,3 + 3,6\n')
    prompts = load_prompts(DataConfig(source=str(source)))
    assert [prompt.id for prompt in prompts] == ["0", "1"]
    assert [prompt.text_or_messages for prompt in prompts] == ["2 + 2,\nplease", "3 + 3"]
    assert [prompt.columns["answer"] for prompt in prompts] == [4, 6]
    with pytest.raises(PromptError, match="split: value 'train'; allowed: null"):
        load_prompts(DataConfig(source=str(source), split="train"))


def read_by_datasets(folder: Path) -> Any:
    return datasets.Dataset.from_csv(str(folder / "rows.csv"), cache_dir=str(folder / "cache"))


def test_a_long_file_is_read_in_pieces_as_datasets_reads_it(tmp_path: Path):
    body = "prompt,answer,note\n" + "".join(f"p{number},{number},\n" for number in range(10_000)) + "x,,\ny,1.0,\n"
    assert rows_of(tmp_path, body) == read_by_datasets(tmp_path).to_list()


@pytest.mark.parametrize(
    ("body", "values", "doubt"),
    [
        ("prompt,answer\na,4\nb,6\n", [4, 6], None),
        ("prompt,answer\na,4.5\nb,6.0\n", [4.5, 6.0], None),
        ("prompt,answer\na,007\nb,six\n", ["007", "six"], None),
        ("\ufeffprompt,answer\r\na,True\r\n\r\nb,False\r\n", [True, False], None),
        ('prompt,answer\na,""\nb,x\n', [None, "x"], None),
        ("prompt,answer\na, 4\nb,6\n", [4, 6], None),
        ("prompt,answer\na,4\nb,007\n", [4, 7], "1 field of column 'answer' .* line 3 has '007', which is read as 7"),
        ("prompt,answer\na,None\nb,x\n", [None, "x"], "line 2 has 'None', which is read as None"),
        ("prompt,answer\na,4\nb,\nc,5\n", [4.0, None, 5.0], "2 fields .* line 2 has '4', which is read as 4.0"),
        ("prompt,answer\na,1e3\nb,2\n", [1000.0, 2.0], "2 fields .* line 2 has '1e3', which is read as 1000.0"),
        ("prompt,answer\na,TRUE\nb,FALSE\n", [True, False], "2 fields .* has 'TRUE', which is read as True"),
    ],
)
def test_values_are_those_of_datasets_and_what_says_something_else_is_doubted(
    tmp_path: Path, body: str, values: list[Any], doubt: str | None
):
    rows = CsvRows(written(tmp_path, body))
    assert [repr(value) for value in rows.values("answer")] == [repr(value) for value in values]
    assert list(read_by_datasets(tmp_path)["answer"]) == values
    assert len(rows.doubts) == (doubt is not None)
    assert doubt is None or re.search(doubt, rows.doubts[0])


def test_doubts_name_the_field_of_their_section(tmp_path: Path):
    source = written(tmp_path, "prompt,answer\na,007\n")
    (doubt,) = doubts_of(load_prompts(DataConfig(source=str(source))), "evaluation.data")
    assert doubt.startswith("evaluation.data.source: 1 field of column 'answer' is read otherwise")
    assert doubts_of(load_prompts(DataConfig())) == []


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        ("prompt,answer\na,4\nb\n", r"rows\.csv: line 3 has 1 fields; allowed: 2, as the header has"),
        ('prompt,answer\n"a\nb",4\nc,5,6\n', r"rows\.csv: line 4 has 3 fields; allowed: 2"),
        ("prompt,answer\na,4,5\nb,6,7\n", "line 2 has 3 fields"),
        ('prompt,answer\na,4\n"b,5\n', "line 3 is not CSV: unexpected end of data"),
        ("prompt,answer,answer\na,4,5\n", "the column 'answer' is there twice"),
        ("prompt,answer\né,4\n".encode("latin-1"), "line 2: byte 0xe9 is not UTF-8"),
        ("prompt,answer\n" + "a,4\n" * 10_001 + "b,x\n", "cannot be read as CSV: ArrowInvalid: .*'x'"),
        ("", "source: .* has no rows"),
        ("prompt,answer\n", "source: .* has no rows"),
        ("prompt;answer\na;4\n", "line 2 has no column 'prompt'; there are: 'prompt;answer'"),
        ("prompt,answer\n7,4\n", "line 2: the prompt is of type int; allowed: text"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused_with_its_line(
    tmp_path: Path, body: str | bytes, reason: str, capfd: pytest.CaptureFixture[str]
):
    with pytest.raises(PromptError, match=reason) as caught:
        load_prompts(DataConfig(source=str(written(tmp_path, body))))
    assert "\n" not in str(caught.value)
    assert capfd.readouterr() == ("", "")


def test_the_index_that_pandas_writes_is_a_column_as_datasets_has_it(tmp_path: Path):
    assert rows_of(tmp_path, ",prompt\n0,a\n1,b\n") == [
        {"Unnamed: 0": 0, "prompt": "a"},
        {"Unnamed: 0": 1, "prompt": "b"},
    ]


def test_a_long_prompt_is_read_and_the_limit_of_the_process_stays(tmp_path: Path):
    before = csv.field_size_limit()
    text = "a" * (before + 1)
    assert rows_of(tmp_path, f"prompt\n{text}\n") == [{"prompt": text}]
    assert csv.field_size_limit() == before


CELLS = st.text(st.characters(blacklist_categories=("Cs",), blacklist_characters="\0"), max_size=12)


@given(st.lists(st.tuples(CELLS, CELLS), min_size=1, max_size=4))
def test_text_that_is_read_otherwise_than_it_was_written_is_refused_or_doubted(
    tmp_path_factory: pytest.TempPathFactory, cells: list[tuple[str, str]]
):
    text = io.StringIO(newline="")
    csv.writer(text).writerows([("one", "two"), *cells])
    try:
        rows = CsvRows(written(tmp_path_factory.mktemp("csv"), text.getvalue()))
    except PromptError:
        return
    assert len(rows) == len(cells)
    for place, name in enumerate(("one", "two")):
        same = all(
            (str(value) if value is not None else "").strip() == cell[place].strip()
            for value, cell in zip(rows.values(name), cells, strict=True)
        )
        assert same or any(repr(name) in doubt for doubt in rows.doubts)
