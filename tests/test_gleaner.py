"""The command line as a user meets it; runs are made in this process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from storage.package_version import VERSION
from storage.records import layout
from storage.records.records import ReportRecord
from storage.records.run import read_report
from storage.stores.connect import connect
from tasks.configuration.run_config import load, parse, settings_digest
from tasks.viewing.run_status import COLUMNS, table
from tests.committed_runs import begin
from tests.small_run import (
    commit_iteration,
    config,
    document,
    plan_iteration,
    roll_out,
    train_small,
)

EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))


def gleaner(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments], catch_exceptions=False)


def refused(result):
    """The lines on stderr of a command that printed nothing else and failed."""
    assert result.exit_code == 1
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return result.stderr.splitlines()


@pytest.fixture
def write(tmp_path, model):
    """write(**sections) -> a configuration file whose run is tmp_path/run."""

    def to_file(**sections):
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(document(str(tmp_path / "run"), sections.pop("model", model), **sections)))
        return file

    return to_file


@pytest.mark.parametrize("file", EXAMPLES, ids=lambda file: file.name)
def test_check_accepts_the_examples_in_one_line(file):
    result = gleaner("check", file)
    assert result.exit_code == 0
    [line] = result.stdout.splitlines()
    settings = load(file)
    sizes = f"{settings.run.num_prompts_per_step} prompts x {settings.run.num_generations} responses"
    assert line.startswith(f"{file} is a valid run configuration: {sizes}")
    assert f"on {settings.pools.rollout.count} slots" in line


@pytest.mark.parametrize(("kind", "what"), [("sft", "examples"), ("dpo", "pairs of examples")])
def test_check_of_examples_names_neither_slots_nor_rewards(write, kind, what):
    file = write(algorithm={"kind": kind})
    settings = yaml.safe_load(file.read_text())
    del settings["rewards"], settings["run"]["num_generations"]
    file.write_text(yaml.safe_dump(settings))
    result = gleaner("check", file)
    assert (result.exit_code, result.stderr) == (0, "")
    assert f"configuration: {settings['run']['num_prompts_per_step']} {what} per iteration, trainer" in result.stdout


def test_check_tells_all_settings_apart_by_a_digest(write):
    first, again, other = (gleaner("check", write(pools={"rollout": {"count": n}})).stdout for n in (5, 5, 6))
    assert (
        first.rpartition("; settings ")[2] == again.rpartition("; settings ")[2] == f"{settings_digest_of(5, write)}\n"
    )
    assert first.rpartition("; settings ")[2] != other.rpartition("; settings ")[2]


def settings_digest_of(count, write):
    return settings_digest(load(write(pools={"rollout": {"count": count}})))


def test_check_says_what_the_machines_cost(write):
    pools = {"rollout": {"count": 5, "usd_per_hour": 1.5}, "train": {"usd_per_hour": 22.25}}
    result = gleaner("check", write(pools=pools))
    assert "on 5 slots at 1.50 $/h, trainer at 22.25 $/h" in result.stdout


def test_check_names_every_problem_and_nothing_else(write):
    lines = refused(gleaner("check", write(run={"sede": 1}, sampling={"temperature": -1})))
    assert lines == [
        f"gleaner: {write()} is not a valid run configuration:",
        "  run.sede: unknown field; did you mean 'seed'?",
        "  sampling.temperature: -1 given; input should be greater than or equal to 0",
    ]


def test_check_of_a_file_that_is_not_there(tmp_path):
    lines = refused(gleaner("check", tmp_path / "none.yaml"))
    assert lines[1:] == ["  cannot be read: No such file or directory"]


def test_check_refuses_a_machine_without_a_price(write):
    [line] = refused(gleaner("check", write(pools={"rollout": {"machine": "potato"}})))
    assert line.startswith("gleaner: pools.rollout.machine: no price for 'potato'; known: ")


def test_check_goes_on_after_the_first_finding(write, tmp_path):
    sections = {
        "pools": {"train": {"machine": "potato"}},
        "policy": {"path": str(tmp_path / "no_model")},
        "data": {"source": str(tmp_path / "no_data.jsonl")},
        "rewards": [{"function": "no.such:reward"}, {"function": "tests.reward_functions:no_such"}],
        "algorithm": {"advantage_estimator": "no.such:estimator"},
        "evaluation": {"data": {"source": str(tmp_path / "no_rows.jsonl")}},
    }
    lines = refused(gleaner("check", "--files", write(**sections)))
    assert len(lines) == 7
    for line, part in zip(
        lines,
        ("potato", "no_model", "no.such:estimator", "no_data.jsonl", "reward", "no_such", "no_rows.jsonl"),
        strict=True,
    ):
        assert line.startswith("gleaner: ")
        assert part in line


@pytest.mark.slow
def test_a_doubt_of_check_is_a_line_that_says_so_at_its_beginning(write):
    told = gleaner("check", "--files", write(optimizer={"learning_rate": 0.0})).stdout.splitlines()
    assert [line.partition("; ")[0] for line in told if line.startswith("not sure: ")] == [
        "not sure: optimizer.learning_rate: value 0"
    ]
    assert [line.partition(" ")[0] for line in told if "not sure" not in line][:-1] == ["looked"] * (len(told) - 2)


def test_check_creates_nothing(write, tmp_path):
    assert gleaner("check", "--files", write()).exit_code == 0
    assert not (tmp_path / "run").exists()


def test_resolved_is_the_whole_configuration_and_reads_back(write):
    file = write()
    result = gleaner("check", "--resolved", file)
    assert result.exit_code == 0
    assert parse(yaml.safe_load(result.stdout)) == load(file)
    assert yaml.safe_load(result.stdout)["optimizer"]["betas"] == [0.9, 0.999]


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": Path("nowhere")}, "policy.path: 'nowhere' does not exist; allowed: a Hugging Face model directory"),
        ({"data": {"source": "none.jsonl"}}, "data.source: value 'none.jsonl'; allowed: 'arithmetic', or an existing"),
        (
            {"rewards": [{"function": "tests.reward_functions:needs_a_column"}]},
            "missing reward column: needs_a_column needs 'difficulty'; there are: 'answer', 'worked'",
        ),
        ({"rewards": [{"function": "tests.reward_functions:nobody"}]}, "reward 'tests.reward_functions:nobody': "),
        (
            {"algorithm": {"advantage_estimator": "tests.own_estimators:missing"}},
            "algorithm.advantage_estimator: value 'tests.own_estimators:missing'; allowed: a function of rewards",
        ),
    ],
)
def test_files_are_opened_only_when_asked_for(write, sections, message):
    file = write(**sections)
    assert gleaner("check", file).exit_code == 0
    [line] = refused(gleaner("check", "--files", file))
    assert line.startswith(f"gleaner: {message}")


def test_status_of_a_run_without_a_committed_iteration(model, tmp_path):
    url = str(tmp_path / "run")
    assert refused(gleaner("status", url)) == [f"gleaner: {url} holds no run"]
    assert not (tmp_path / "run").exists()
    plan_iteration(config(url, model))
    assert gleaner("status", url).stdout == f"{url} holds no committed iteration yet\n"


def test_the_version_is_told():
    assert gleaner("--version").stdout == f"gleaner {VERSION}\n"


def test_check_as_json_is_the_whole_configuration(write):
    file = write()
    found = json.loads(gleaner("check", file, "--json").stdout)
    assert (found["config"], found["looked_at"]) == (str(file), [])
    assert parse(found["settings"]) == load(file)
    [line] = refused(gleaner("check", file, "--json", "--resolved"))
    assert line.startswith("gleaner: check: allowed: CONFIG [--resolved | --json] [--files]")


@pytest.mark.slow
def test_status_shows_the_history_of_a_run(model, tmp_path):
    url = str(tmp_path / "run")
    for iteration in range(2):
        plan_iteration(config(url, model))
        roll_out(url, iteration)
        train_small(url, iteration)
        commit_iteration(url, iteration)
    result = gleaner("status", url)
    assert result.exit_code == 0
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in result.stdout.splitlines() if "│" in line]
    assert [row[0] for row in rows] == ["0", "1"]
    assert len(rows[0]) == len(COLUMNS) + 1
    for iteration, row in enumerate(rows):
        metrics = read_report(connect(url), iteration).metrics
        assert row[1:5] == [
            f"{metrics['reward']:.3f}",
            f"{metrics['completions/mean_length']:.1f}",
            f"{metrics['completions/max_length']:.0f}",
            f"{metrics['num_tokens']:.0f}",
        ]
    found = json.loads(gleaner("status", url, "--json").stdout)
    assert [each["metrics"] for each in found["iterations"]] == [
        read_report(connect(url), iteration).metrics for iteration in range(2)
    ]
    assert (found["run_url"], found["evaluations"], found["stopped"]) == (url, [], None)
    assert "nan" not in result.stdout
    [titles] = [line for line in result.stdout.splitlines() if "reward" in line]
    assert "regenerated" in titles
    sizes = [
        f"{each['metrics']['weights/bytes']:,.0f} (version {each['weight_version']})" for each in found["iterations"]
    ]
    assert f"bytes of weights: {', '.join(sizes)}" in result.stdout


def test_a_metric_that_a_report_lacks_is_no_number_and_no_error():
    report = ReportRecord(
        iteration=3,
        weight_version=4,
        next_prompt=0,
        metrics={"reward": 0.25},
        rewards=(),
        lengths=(),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )
    cells = [next(iter(column.cells)) for column in table([report]).columns]
    # Dollars have no column: no iteration cost any.
    assert cells == ["3", "0.250"] + ["nan"] * (len(COLUMNS) - 2)


def test_status_names_a_damaged_report(model, tmp_path):
    url = str(tmp_path / "run")
    begin(connect(url))
    connect(url).put(layout.report(0), b"{")
    [line] = refused(gleaner("status", url))
    assert line.startswith("gleaner: object 'iterations/000000/report.json' is corrupt: ")


def test_status_and_sweep_name_a_missing_report(tmp_path):
    store = connect(str(tmp_path / "run"))
    begin(store)
    store.put(layout.report(1), b"{}")
    for command in ("status", "sweep"):
        [line] = refused(gleaner(command, store.url))
        assert line.startswith(f"gleaner: object '{layout.report(0)}' is corrupt: it is missing, although ")


COMMANDS = [
    ("status",),
    ("sweep",),
    ("watch",),
    ("watch", "--once"),
    ("view", "--port", "0"),
    ("view", "--to", "out"),
    ("export", "--rollouts", "--to", "out"),
    ("export", "--model", "--to", "out"),
    ("export", "--adapter", "--to", "out"),
    ("forecast", "--realised"),
    ("join",),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_refuses_a_run_of_another_format(tmp_path, command):
    store = connect(str(tmp_path / "run"))
    begin(store)
    store.put(layout.RUN, store.get(layout.RUN).replace(b'"format":1', b'"format":2'))
    before = store.list("")
    assert refused(gleaner(*command, store.url)) == [
        "gleaner: object 'run.json' is corrupt: format 2; this version of Gleaner reads format 1"
    ]
    assert store.list("") == before


@pytest.mark.parametrize("command", [each for each in COMMANDS if each not in [("watch",), ("join",)]], ids=" ".join)
def test_every_command_says_that_there_is_no_run(tmp_path, command):
    assert refused(gleaner(*command, tmp_path / "none")) == [f"gleaner: {tmp_path}/none holds no run"]
    assert not (tmp_path / "none").exists()


def test_a_forecast_refuses_the_run_of_another_format(write, tmp_path):
    store = connect(str(tmp_path / "run"))
    begin(store)
    store.put(layout.RUN, store.get(layout.RUN).replace(b'"format":1', b'"format":2'))
    [line] = refused(gleaner("forecast", write()))
    assert line.endswith("format 2; this version of Gleaner reads format 1")


@pytest.mark.parametrize("url", ["gcs://bucket/run", "s3:/bucket", "memory://"])
def test_status_of_what_is_no_store(url):
    [line] = refused(gleaner("status", url))
    assert line.startswith(f"gleaner: storage URL: value '{url}'; allowed: a path, file:///path, s3://bucket/prefix")


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
@pytest.mark.parametrize("url", ["~nosuchuser/run", "/" + "x" * 300, "run\udcff", "run\n", "x://y"])
def test_every_command_refuses_what_is_no_url(command, url):
    [line] = refused(gleaner(*command, url))
    assert line.startswith("gleaner: ")


def test_an_unreadable_configuration_is_one_line(tmp_path):
    assert refused(gleaner("check", tmp_path / ("x" * 300)))[1:] == ["  cannot be read: File name too long"]
    assert refused(gleaner("forecast", tmp_path))[1:] == ["  cannot be read: Is a directory"]


@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "stderr"),
    [
        (["--help"], "> /dev/full", 1, "gleaner: [Errno 28] No space left on device\n"),
        (["status", "RUN"], "> /dev/full", 1, "gleaner: [Errno 28] No space left on device\n"),
        (["watch", "--once", "--json", "RUN"], "> /dev/full", 1, "gleaner: [Errno 28] No space left on device\n"),
        (["status", "RUN"], ">&-", 0, ""),
        (["watch", "--once", "RUN"], ">&-", 0, ""),
        (["--help"], ">&-", 0, ""),
        (["status", "$(printf '\\377')"], "", 1, "gleaner: storage URL: value "),
        (["check", "$(printf '\\377')"], "", 1, "gleaner: "),
    ],
)
@pytest.mark.slow
def test_no_output_is_no_traceback(tmp_path, arguments, redirection, code, stderr):
    store = connect(str(tmp_path / "run"))
    begin(store)
    words = " ".join(arguments).replace("RUN", store.url)
    command = f"{sys.executable} -m gleaner {words} {redirection}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=False, timeout=600)
    assert done.returncode == code
    assert done.stderr.startswith(stderr)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.slow
def test_looking_needs_neither_flyte_nor_torch():
    code = "import sys, gleaner; print(sorted({'flytekit', 'torch', 'transformers', 's3fs'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "[]\n"


def test_without_a_command_it_says_what_there_is():
    result = CliRunner().invoke(main, ["--help"])
    assert result.exit_code == 0
    assert {"check", "status"} <= set(result.stdout.split())


def test_escapes_in_an_error_are_written_out(write):
    # What a user's module says when it is loaded.
    file = write(rewards=[{"function": "tests.raising_escapes:reward"}])
    [line] = refused(gleaner("check", file, "--files"))
    assert r"\x1b[2J\x9b31m" in line
    assert not {"\x1b", "\x9b"} & set(line)
