"""Files of prompts that are damaged, or hold what Python cannot: each is refused in one line that names the file.

To add a case, add a function that writes it below a folder and returns its path.
"""

import json

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.configuration.data import DataConfig
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError

BEYOND = 1 << 62


def timestamps(folder):
    file = folder / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "at": pa.array([BEYOND], pa.timestamp("ms"))}), file)
    return file


def durations(folder):
    file = folder / "rows.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "long": pa.array([BEYOND], pa.duration("ms"))}), file)
    return file


def no_parquet(folder):
    file = folder / "rows.parquet"
    file.write_bytes(b"PAR1")
    return file


def saved(folder):
    datasets.DatasetDict({"train": datasets.Dataset.from_dict({"prompt": ["a"]})}).save_to_disk(str(folder / "set"))
    return folder / "set"


def list_of_splits(folder):
    (saved(folder) / "dataset_dict.json").write_text("[]")
    return folder / "set"


def no_splits(folder):
    (saved(folder) / "dataset_dict.json").write_text("{}")
    return folder / "set"


def splits_that_are_none(folder):
    (saved(folder) / "dataset_dict.json").write_text('{"splits": null}')
    return folder / "set"


def splits_that_are_not_there(folder):
    (saved(folder) / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    return folder / "set"


def cut_splits(folder):
    (saved(folder) / "dataset_dict.json").write_text("{")
    return folder / "set"


def broken_state(folder):
    (saved(folder) / "train" / "state.json").write_text("[]")
    return folder / "set"


def broken_info(folder):
    (saved(folder) / "train" / "dataset_info.json").write_text('{"features": 7}')
    return folder / "set"


def deep_line(folder):
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": ' + "[" * 100_000 + "\n")
    return file


def long_number(folder):
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": ' + "9" * 5000 + "}\n")
    return file


def a_list(folder):
    file = folder / "rows.jsonl"
    file.write_text(json.dumps([1]) + "\n")
    return file


def key_twice(folder):
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": "a", "answer": "4", "answer": "5"}\n')
    return file


def key_twice_in_a_message(folder):
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "a", "role": "system"}]}\n')
    return file


def key_twice_deep_in_a_column(folder):
    file = folder / "rows.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"prompt": "a", "x": [{"y": {"' + "z" * 999 + '": 1, "' + "z" * 999 + '": 1}}]}\n'
    )
    return file


def csv_with_a_short_line(folder):
    file = folder / "rows.csv"
    file.write_text("prompt,answer\na\n")
    return file


def csv_with_an_open_quote(folder):
    file = folder / "rows.csv"
    file.write_text('prompt,answer\n"a,4\n')
    return file


def csv_of_zeros(folder):
    file = folder / "rows.csv"
    file.write_bytes(b"\0" * 1000)
    return file


def folder_named_as_csv(folder):
    (folder / "rows.csv").mkdir()
    return folder / "rows.csv"


def rows(folder, **row):
    file = folder / "rows.jsonl"
    file.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": "a", **row}) + "\n")
    return file


def truth_as_text(folder):
    return rows(folder, reward_model='{"ground_truth": "4"}')


def truth_as_printed(folder):
    return rows(folder, reward_spec="{'ground_truth': '4'}")


def messages_of_others(folder):
    return rows(folder, prompt=[{"from": "human", "value": "a"}])


def an_image(folder):
    return rows(folder, prompt=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}])


def calls_as_text(folder):
    return rows(folder, prompt=[{"role": "assistant", "content": "", "tool_calls": '[{"name": "f"}]'}])


def a_conversation_as_an_object(folder):
    return rows(folder, prompt={"messages": [{"role": "user", "content": "a"}]})


def deep_message(folder):
    inner = '{"a":' * 200 + "1" + "}" * 200
    file = folder / "rows.jsonl"
    file.write_text('{"prompt": [{"role": "user", "content": "a", "tool_calls": [' + inner + "]}]}\n")
    return file


def folder_named_as_a_file(folder):
    (folder / "rows.jsonl").mkdir()
    return folder / "rows.jsonl"


def long_path(folder):
    return folder / ("x" * 300 + ".jsonl")


def nul(folder):
    return f"{folder}/nul\0.jsonl"


def unknown_user(folder):
    return "~nosuchuser/rows.jsonl"


CASES = [value for value in list(globals().values()) if getattr(value, "__module__", "") == __name__]


@pytest.mark.parametrize("write", [case for case in CASES if case not in (saved, rows)], ids=lambda case: case.__name__)
def test_it_is_refused_in_one_line(tmp_path, write):
    config = DataConfig(
        source=str(write(tmp_path)),
        split="train" if (tmp_path / "set").exists() else None,
    )
    with pytest.raises(PromptError) as caught:
        load_prompts(config)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 700
