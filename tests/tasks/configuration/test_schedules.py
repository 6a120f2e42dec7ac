"""Files of scheduled runs: what is read, and what is refused with one line that names the place."""

from pathlib import Path

import pytest

from tasks.configuration.run_config import load
from tasks.configuration.schedules import load_schedules

EXAMPLES = Path(__file__).parents[3] / "examples"


def read(folder, text):
    (folder / "demo.yaml").write_text((EXAMPLES / "demo.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "schedules.yaml").write_text(text, encoding="utf-8")
    return load_schedules(folder / "schedules.yaml")


def test_a_run_needs_nothing_but_its_configuration(tmp_path):
    [(name, (run, settings))] = read(tmp_path, "a-1: {config: demo.yaml}").items()
    assert (name, run.schedule, run.iterations, run.notify) == ("a-1", "0 * * * *", 4, ())
    assert settings == load(EXAMPLES / "demo.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "allowed: a mapping from names of launch plans to scheduled runs"),
        ("[a]", "allowed: a mapping from names of launch plans to scheduled runs"),
        ("a.b: {config: demo.yaml}", "'a.b' given; allowed: letters, digits, '_' and '-', a letter first, up to 63"),
        ("1: {config: demo.yaml}", "'1' given; allowed: letters"),
        ("a: {schedule: '@daily'}", "a.config: missing"),
        ("a: {config: demo.yaml, iteration: 3}", "a.iteration: unknown field; did you mean 'iterations'?"),
        ("a: {config: demo.yaml, iterations: 0}", "a.iterations: 0 given; input should be greater than or equal to 1"),
        ("a: {config: demo.yaml, notify: [{email: [team]}]}", 'a.notify.0.email.0: "team" given'),
        ("a: {config: demo.yaml, notify: [{phases: [failed]}]}", "in at least one of email, slack, pager_duty"),
        ("a: {config: demo.yaml, notify: [{phases: [], email: [a@b]}]}", "a.notify.0.phases: [] given"),
        ("a: {config: demo.yaml, notify: [{phases: [running], email: [a@b]}]}", 'a.notify.0.phases.0: "running" given'),
        ("a: {config: demo.yaml}\nb: {config: ./demo.yaml}", "b.config: the run runs/demo is that of 'a'"),
        ("a: {config: absent.yaml}", "absent.yaml is not a valid run configuration:"),
        ("a: {config: demo.yaml", "schedules.yaml: not YAML or JSON: line 1"),
    ],
)
def test_what_cannot_be_scheduled_is_one_line(tmp_path, text, message):
    with pytest.raises(ValueError, match=f"^{tmp_path}") as error:
        read(tmp_path, text)
    assert message in str(error.value)
