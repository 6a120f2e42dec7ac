"""Pipes, sockets and devices where a user names a file: each is refused by name, and none is opened.

To open a pipe waits until somebody writes into it, so every test has a time limit.
"""

import os
import shutil
import socket
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from resources.documents import DocumentError, read_document
from resources.prices import PricesError, price_table
from resources.regular_files import open_file, read_file
from resources.spot_trace import TraceError, read_trace
from tasks.configuration.data import DataConfig
from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.scenario import LengthsScenario, ScenarioError, WorkScenario
from tasks.grading.model_folder import ModelFolder
from tasks.grading.reward import GradingError
from tasks.learning.pretrained import ModelError, vocabulary_size
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tests.small_run import document

pytestmark = pytest.mark.timeout(120)


def pipe(path: Path) -> Path:
    os.mkfifo(path)
    return path


def lengths_of(path: Path) -> ResponseLengths:
    lengths = LengthsScenario(path=str(path), column="tokens", cap=9)
    work = WorkScenario(num_prompts_per_step=1, num_generations=1, prompt_tokens=1, lengths=lengths, iterations=1)
    return ResponseLengths(work, 0)


def refused(kind, match, read, *given):
    with pytest.raises(kind, match=match) as caught:
        read(*given)
    assert "\n" not in str(caught.value)


def test_a_file_is_read_as_it_is_also_behind_a_link(tmp_path):
    (tmp_path / "file").write_bytes(b"all of it")
    (tmp_path / "link").symlink_to("file")
    assert read_file(tmp_path / "file") == read_file(tmp_path / "link") == b"all of it"
    refused(FileNotFoundError, "No such file", read_file, tmp_path / "missing")
    refused(IsADirectoryError, "Is a directory", read_file, tmp_path)


def test_what_is_no_file_is_named_and_not_opened(tmp_path):
    refused(OSError, "it is a pipe; allowed: a file", open_file, pipe(tmp_path / "pipe"))
    (tmp_path / "link").symlink_to("pipe")
    refused(OSError, "it is a pipe", open_file, tmp_path / "link")
    refused(OSError, "it is a device", open_file, Path("/dev/zero"))
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        refused(OSError, "it is a socket", open_file, tmp_path / "socket")


@pytest.mark.parametrize(
    ("name", "kind", "read"),
    [
        ("config.yaml", DocumentError, read_document),
        ("prices.yaml", PricesError, price_table),
        ("trace.csv", TraceError, read_trace),
        ("trace.json", TraceError, read_trace),
        ("lengths.csv", ScenarioError, lengths_of),
        ("lengths.jsonl", ScenarioError, lengths_of),
        *(
            (f"rows.{kind}", PromptError, lambda path: load_prompts(DataConfig(source=str(path))))
            for kind in ("jsonl", "csv", "tsv", "parquet")
        ),
    ],
)
def test_every_reader_of_a_named_file_refuses_a_pipe(tmp_path, name, kind, read):
    refused(kind, "it is a pipe; allowed: a file", read, pipe(tmp_path / name))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"])
def test_a_folder_of_a_model_may_hold_no_pipe(model, tmp_path, name):
    folder = shutil.copytree(model, tmp_path / "model")
    (folder / name).unlink(missing_ok=True)
    pipe(folder / name)
    match = f"cannot be read: {name} in it is a pipe; allowed: files and folders"
    refused(ModelError, f"policy.path: .*{match}", vocabulary_size, folder)
    refused(GradingError, f"reward 'judge': model: .*{match}", ModelFolder, "judge", folder)


@pytest.mark.parametrize("below", ["", "train"])
def test_a_data_set_on_disk_may_hold_no_pipe(tmp_path, below):
    folder = tmp_path / "rows" / below
    folder.mkdir(parents=True)
    pipe(folder / "state.json")
    source = str(tmp_path / "rows")
    refused(PromptError, "state.json in it is a pipe", load_prompts, DataConfig(source=source, split="train"))


def test_commands_end_with_a_line_that_names_the_pipe(model, tmp_path):
    config = pipe(tmp_path / "config.yaml")
    for command in (["check", str(config)], ["forecast", str(config)], ["init", "--from", "trl", str(config)]):
        result = CliRunner().invoke(main, command)
        assert result.exit_code == 1, result.output
        assert "config.yaml" in result.output
        assert "it is a pipe; allowed: a file" in result.output
    rows = pipe(tmp_path / "rows.jsonl")
    settings = document("memory://pipes", model) | {"data": {"source": str(rows)}}
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(settings))
    result = CliRunner().invoke(main, ["check", str(tmp_path / "run.yaml"), "--files"])
    assert result.exit_code == 1
    assert f"data.source: value '{rows}': it is a pipe; allowed: a file" in result.output
