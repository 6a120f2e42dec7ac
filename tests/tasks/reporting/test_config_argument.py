"""The argument of commands that take a configuration: a file, and fields beside it."""

import json
from pathlib import Path

import click
from click.testing import CliRunner

from gleaner import main
from tasks.reporting.config_argument import GivenConfig
from tests.small_run import document


def arguments(group, name=""):
    """Every argument CONFIG of a command, by the command's words."""
    for word, command in group.commands.items():
        if isinstance(command, click.Group):
            yield from arguments(command, f"{name} {word}")
        yield from ((f"{name} {word}".strip(), each) for each in command.params if each.name == "config")


def test_each_command_that_takes_a_configuration_takes_fields_beside_it():
    found = dict(arguments(main))
    assert set(found) == {"check", "doctor", "fleet admit", "forecast", "regrade", "serve"}
    for argument in found.values():
        given = argument.process_value(click.Context(main), ("a.yaml", "run.seed=9"))
        assert given == GivenConfig(path=Path("a.yaml"), overrides=("run.seed=9",))


def test_a_field_beside_the_file_is_checked_and_recorded_as_if_it_stood_there(tmp_path):
    file = tmp_path / "my.yaml"
    file.write_text(json.dumps(document(str(tmp_path / "run"), tmp_path)))

    def check(*words):
        return CliRunner().invoke(main, ["check", str(file), *words])

    found = json.loads(check("optimizer.learning_rate=1e-6", "--json", "run.seed=9").stdout)
    assert found["config"] == f"{file} optimizer.learning_rate=1e-6 run.seed=9"
    assert found["settings"]["optimizer"]["learning_rate"] == 1e-6
    assert found["settings"]["run"]["seed"] == 9
    refused = check("optimizer.learning_rat=1e-6")
    assert refused.exit_code == 1
    assert refused.stderr.splitlines()[1] == "  optimizer.learning_rat: unknown field; did you mean 'learning_rate'?"
