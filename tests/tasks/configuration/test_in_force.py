from pathlib import Path

import pytest
import yaml

from tasks.configuration.in_force import ESSENTIAL, in_force
from tasks.configuration.run_config import dump, load, parse

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_it_reads_back_as_the_same_configuration(path, tmp_path):
    written = tmp_path / "in_force.yaml"
    written.write_text(in_force(dump(load(path))))
    assert load(written) == load(path)
    assert parse(yaml.safe_load(written.read_text())) == load(path)


def test_the_fields_of_a_first_run_come_first():
    text = in_force(dump(load(EXAMPLES[0])))
    sections = [line.removesuffix(":") for line in text.splitlines() if not line.startswith((" ", "-"))]
    named = [section.partition(":")[0] for section in sections]
    assert named[: len(ESSENTIAL)] == list(ESSENTIAL)
    run = text[: text.index("policy:")].splitlines()
    assert [line.split(":")[0].strip() for line in run[1:4]] == list(ESSENTIAL["run"])
    assert run[4] == "  # the rest of run, for experts"


def test_every_essential_field_exists():
    document = dump(load(EXAMPLES[0])) | {"lora": {"rank": 8}}
    for section, names in ESSENTIAL.items():
        assert set(names or ()) <= set(document[section] if isinstance(document[section], dict) else ()), section
