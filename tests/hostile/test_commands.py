"""Options and paths that no command can use: one line, or the usage, and never a traceback."""

import pytest
from click.testing import CliRunner

from gleaner import main
from tests.viewed_run import write_viewed_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_viewed_run(str(tmp_path_factory.mktemp("runs") / "run"), tmp_path_factory.mktemp("model")).url


def gleaner(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, done.output


@pytest.mark.parametrize("value", ["nan", "inf", "-inf", "1e300", "-1", "often"])
@pytest.mark.parametrize(
    ("command", "option"),
    [("watch", "--interval-s"), ("join", "--time-limit-s"), ("join", "--patience-s"), ("join", "--usd-per-hour")],
)
def test_a_number_that_no_clock_or_bill_holds_is_refused_by_its_option(run, command, option, value):
    code, output = gleaner(command, run, option, value)
    assert code == 2
    assert output.splitlines()[-1].startswith(f"Error: Invalid value for '{option}': ")


def test_a_page_that_cannot_be_written_is_named_as_it_was_given(run):
    assert gleaner("view", run, "--to", "/proc/page.html") == (
        1,
        "gleaner: /proc/page.html cannot be written: No such file or directory\n",
    )


@pytest.mark.parametrize("library", ["trl", "verl"])
def test_a_script_that_cannot_be_read_is_named(tmp_path, library):
    folder, target = tmp_path / "folder", tmp_path / "run.yaml"
    folder.mkdir()
    missing = tmp_path / "missing"
    for file, reason in ((folder, "Is a directory"), (missing, "No such file or directory")):
        assert gleaner("init", "--from", library, file, "--to", target) == (
            1,
            f"gleaner: {file}: cannot be read: {reason}\n",
        )
    assert not target.exists()


def test_a_configuration_that_cannot_be_written_is_named(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("python -m verl.trainer.main_ppo data.train_batch_size=8\n")
    code, output = gleaner("init", "--from", "verl", script, "--to", "/proc/run.yaml")
    assert (code, output) == (1, "gleaner: --to: /proc/run.yaml cannot be written: No such file or directory\n")
