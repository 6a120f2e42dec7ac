"""YAML and JSON that can be read in two ways, or not at all: each is refused in one line that names the line.

To add a case, add a line to REFUSED: the file's text or bytes, and what the message says.
"""

import json

import pytest

from resources.documents import DocumentError, exact_float, read_document
from resources.prices import PricesError, machine_price
from tasks.configuration.run_config import ConfigError
from tasks.configuration.run_config import load as load_config
from tasks.forecasting.scenario import ScenarioError
from tasks.forecasting.scenario import load as load_scenario

REFUSED = [
    ("a: 1\nb: 2\na: 3\n", "line 3: 'a' is given twice, first in line 1"),
    ("run:\n  seed: 1\n  seed: 1\n", "line 3: 'seed' is given twice, first in line 2"),
    ('{"a": {"b": 1,\n "b": 2}}', "line 2: 'b' is given twice, first in line 1"),
    ('{"a": 1, "\\u0061": 2}', "'a' is given twice"),
    ("1: x\n'1': y\n", "line 2: '1' is given twice"),
    ("- a: 1\n  a: 2\n", "line 2: 'a' is given twice"),
    ("base: &b {x: 1}\nuse: {<<: *b, y: 1, y: 2}\n", "line 2: 'y' is given twice"),
    ("on: 1\n", "line 1: a key that is not text (on)"),
    ("null: 1\n", "line 1: a key that is not text (null)"),
    ("1.5: 1\n", "line 1: a key that is not text (1.5)"),
    ("? [a]\n: 1\n", "line 1: a key that is not text"),
    ("? {a: 1}\n: 1\n", "line 1: a key that is not text"),
    ("a: 1e-400\n", "line 1: 1e-400 is no number that can be read: 1e-400 is beyond"),
    ("a: 1:30\n", "line 1: 1:30 is read in base 60 or 8"),
    ("a: 010\n", "line 1: 010 is read in base 60 or 8"),
    ("a: -1:30.5\n", "base 60"),
    ("a: -1.0e-400\n", "beyond the range"),
    ("a: 1e400\n", "beyond the range"),
    ("a: " + "9" * 5000 + "\n", "line 1: 9999999999"),
    ("a: !!binary aGk=\n", "line 1: could not determine a constructor for the tag 'tag:yaml.org,2002:binary'"),
    ("a: !!set {x}\n", "line 1: could not determine a constructor"),
    ("a: !!python/object:os.system x\n", "line 1: could not determine a constructor"),
    ("a: &a [*a]\n", "line 1: an anchor that contains itself"),
    ("x: 1\na: [\n", "not YAML or JSON: line "),
    ('x: 1\na: "\\ud83d"\n', "line 2: half of a character"),
    (b"x: 1\na: \xff\n", "line 2: byte 0xff is not UTF-8"),
    (b"a: \x00\n", "not YAML or JSON: "),
    ("a: " + "[" * 3000, "not YAML or JSON"),
    ("a: 1\n---\nb: 2\n", "not YAML or JSON: line 2: but found another document"),
]


def named(case):
    return repr(case)[:40]


@pytest.mark.parametrize("suffix", [".yaml", ".json"])
@pytest.mark.parametrize(("content", "message"), REFUSED, ids=named)
def test_it_is_refused_with_its_line(tmp_path, content, message, suffix):
    file = tmp_path / f"document{suffix}"
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(DocumentError) as caught:
        read_document(file)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("load", "error"), [(load_config, ConfigError), (machine_price, PricesError), (load_scenario, ScenarioError)]
)
def test_every_reader_of_such_files_is_as_strict(tmp_path, load, error):
    file = tmp_path / "document.yaml"
    file.write_text("a: 1\na: 2\n")
    arguments = ("g6.xlarge", file) if load is machine_price else (file,)
    with pytest.raises(error, match="line 2: 'a' is given twice, first in line 1"):
        load(*arguments)


@pytest.mark.parametrize("name", ["nowhere.yaml", "nul\0.yaml", "x" * 300, "surrogate\udcff"])
def test_a_path_that_cannot_be_read_is_refused(tmp_path, name):
    with pytest.raises(DocumentError, match=r"^cannot be read: "):
        read_document(tmp_path / name)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a: 1e-6", 1e-6),
        ("a: 1.0e+3", 1000.0),
        ("a: 0.0e-400", 0.0),
        ("a: .inf", float("inf")),
        ("a: 2026-11-23", "2026-11-23"),
        ('{"a": "\\ud83d\\ude00"}', "\U0001f600"),
        ("\ufeffa: x", "x"),
        ("base: &b {x: 1}\na: {<<: *b, x: 2}", {"x": 2}),
        ("a: {1: 0.5}", {"1": 0.5}),
    ],
)
def test_what_is_plain_is_read(tmp_path, text, value):
    file = tmp_path / "document.yaml"
    file.write_text(text)
    assert read_document(file)["a"] == value


def test_json_may_have_tabs(tmp_path):
    file = tmp_path / "document.json"
    file.write_text(json.dumps({"a": ["\t", {"b": None}]}, indent="\t"))
    assert read_document(file) == {"a": ["\t", {"b": None}]}


def test_a_number_that_would_become_another_is_none():
    assert exact_float("5e-324") == 5e-324
    with pytest.raises(ValueError, match="beyond the range"):
        exact_float("1e-325")
