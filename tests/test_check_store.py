"""`gleaner check --store` as a user meets it."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from gleaner import main
from storage.records.fitness import prove
from storage.stores import connect
from storage.stores.memory import MemoryStore
from tests.storage.stores.test_race import CheckThenAct

ROOT = Path(__file__).parents[1]


def check(*arguments):
    return CliRunner().invoke(main, ["check", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def memory(monkeypatch):
    """Puts a store at memory://proof."""
    return lambda store: monkeypatch.setitem(connect._memory_stores, "proof", store)


@pytest.mark.slow
def test_a_fit_store_is_one_line_per_property_and_a_verdict(memory):
    memory(MemoryStore())
    result = check("--store", "memory://proof", "--keys", "5")
    lines = result.stdout.splitlines()
    assert result.exit_code == 0
    names = [finding.name for finding in prove(MemoryStore(), keys=1, listed=20)]
    assert [line.split(": ")[0] for line in lines[:-1]] == names
    assert "16 writers, 5 keys, 80 creates, 5 winners, 0 torn or foreign bodies" in lines[1]
    assert lines[-1] == "memory://proof is fit"


@pytest.mark.slow
def test_an_unfit_store_is_named_with_what_it_lacks(memory):
    memory(CheckThenAct())
    result = check("--store", "memory://proof", "--keys", "3")
    lines = result.stdout.splitlines()
    assert result.exit_code == 1
    assert lines[1].startswith("one winner among threads: LACKING: ")
    assert "of 3 keys went wrong; the first: " in lines[1]
    assert lines[-1] == "memory://proof is not fit; lacking: one winner among threads"


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "code"), [(MemoryStore, 0), (CheckThenAct, 1)])
def test_json_is_one_object(memory, kind, code):
    memory(kind())
    result = check("--store", "memory://proof", "--keys", "2", "--json")
    shown = json.loads(result.stdout)
    assert result.exit_code == code
    assert shown["fit"] is (code == 0)
    assert [each["name"] for each in shown["findings"] if each["lack"]] == ["one winner among threads"] * code


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("a.yaml", "--store", "memory://x"),
        ("a.yaml", "--json", "--resolved"),
        ("--store", "memory://x", "--resolved"),
        ("--store", "memory://x", "--files"),
    ],
)
def test_either_a_configuration_or_a_store(arguments):
    result = check(*arguments)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.startswith("gleaner: check: allowed: CONFIG")


def test_a_store_that_cannot_be_used_is_one_line(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    result = check("--store", tmp_path / "file")
    assert result.exit_code == 1
    assert result.stderr.startswith("gleaner: cannot create 'probe/")
    assert len(result.stderr.splitlines()) == 1
    assert check("--store", "gcs://bucket/x").stderr.startswith(
        "gleaner: storage URL: value 'gcs://bucket/x'; allowed:"
    )


@pytest.mark.slow
@pytest.mark.parametrize("after", ["a second create", "one winner among threads"])
def test_ctrl_c_leaves_nothing(tmp_path, after):
    command = [sys.executable, "-m", "gleaner", "check", "--store", str(tmp_path / "run"), "--keys", "400"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=None, bufsize=1
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith(after):
                break
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=600)
    assert process.returncode == 130
    assert errors.startswith("gleaner: interrupted; nothing is left half done; the same command again: ")
    assert errors.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
