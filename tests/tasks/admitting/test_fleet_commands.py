"""`gleaner fleet ...`: what it writes, what it refuses in one line, and what it shows."""

import json

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import AdmittedRun, FleetRecord, HostRecord
from storage.fleet.spent_records import RestoredState, SpentEntry, SpentRecord
from storage.records import records
from storage.stores.connect import connect
from tasks.admitting.fleet_admission import expected_state_bytes
from tasks.configuration.run_config import parse
from tasks.preparing.iteration import prepare
from tasks.sharing.admission_queue import Waiting
from tasks.sharing.membership import open_fleet
from tests.fleet_records import a_host
from tests.small_run import EXECUTION, document


@pytest.fixture
def gleaner():
    """gleaner(*arguments) -> (exit code, all output)"""

    def run(*arguments):
        done = CliRunner().invoke(main, [str(each) for each in arguments], standalone_mode=True)
        return done.exit_code, done.output

    return run


@pytest.fixture
def fleet(tmp_path, gleaner):
    url = tmp_path / "fleet"
    assert gleaner("fleet", "init", url, "--runs", tmp_path / "runs")[0] == 0
    return url


@pytest.fixture
def config_file(tmp_path, fleet, model):
    def write(name="a", **sections):
        trainer = {"placement": "shared", "fleet": str(fleet)} | sections.pop("trainer", {})
        file = tmp_path / f"{name}.yaml"
        file.write_text(yaml.safe_dump(document(str(tmp_path / "runs" / name), model, trainer=trainer, **sections)))
        return file

    return write


PROFILE = ("--phase-s", 60, "--cycle-s", 300)


def test_a_fleet_is_made_once_and_its_rules_stay(tmp_path, fleet, gleaner):
    code, output = gleaner("fleet", "init", fleet, "--runs", tmp_path / "others")
    assert (code, output) == (1, f"gleaner: {fleet} holds a fleet already; nothing was changed\n")
    rules = records.read(connect(str(fleet)), FleetRecord, fleet_layout.FLEET)
    assert rules.run_prefixes == (str(tmp_path / "runs"),)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--host-ttl-s", 0, "host_ttl_s: value 0.0; allowed"),
        ("--slowdown-max", 1, "slowdown_max: value 1.0; allowed"),
        ("--patience-s", -1, "patience_s: value -1.0; allowed: 0 or more"),
    ],
)
def test_rules_that_cannot_be_are_refused(tmp_path, gleaner, option, value, said):
    code, output = gleaner("fleet", "init", tmp_path / "new", "--runs", tmp_path, option, value)
    assert code == 1
    assert said in output
    assert not (tmp_path / "new" / "fleet.json").exists()


def test_a_run_is_admitted_once_shown_and_let_go_for_good(tmp_path, fleet, gleaner, config_file, model):
    file = config_file(trainer={"nproc_per_node": 2})
    code, output = gleaner("fleet", "admit", file, *PROFILE)
    assert code == 0, output
    url = str(tmp_path / "runs" / "a")
    run = records.read(connect(str(fleet)), AdmittedRun, fleet_layout.admitted(fleet_layout.run_id(url)))
    assert (run.run_url, run.phase_s, run.cycle_s, run.load) == (url, 60.0, 300.0, 0.2)
    assert f"is admitted as {run.id}" in output
    assert gleaner("fleet", "admit", file, "--phase-s", 1, "--cycle-s", 2)[1] == output
    code, output = gleaner("fleet", "status", fleet)
    assert code == 0
    assert run.id in output
    assert "waits for a host" in output
    [row] = [line for line in output.splitlines() if run.id in line]
    assert row.split("│")[-2].strip() == "2"
    records.put(connect(str(fleet)), fleet_layout.host("h"), a_host("h", devices=2))
    [row] = [line for line in gleaner("fleet", "status", fleet)[1].splitlines() if "a-machine" in line]
    assert row.split("│")[3].strip() == "2"
    assert gleaner("fleet", "leave", fleet, url)[0] == 0
    code, output = gleaner("fleet", "admit", file, *PROFILE)
    assert code == 1
    assert "has left the fleet" in output
    assert "left" in gleaner("fleet", "status", fleet)[1]


def test_a_run_that_would_make_another_too_slow_is_refused_in_one_line_and_nothing_is_written(
    tmp_path, fleet, gleaner, config_file
):
    assert gleaner("fleet", "admit", config_file("a"), *PROFILE)[0] == 0
    before = connect(str(fleet)).list("")
    code, output = gleaner("fleet", "admit", config_file("b"), "--phase-s", 250, "--cycle-s", 300)
    assert (code, output.count("\n")) == (1, 1)
    assert output.startswith(f"gleaner: {tmp_path}/runs/b is not admitted: on the best host, a host that could come")
    assert f"{tmp_path}/runs/a 1." in output
    assert "allowed in this fleet: 1.1 times" in output
    assert connect(str(fleet)).list("") == before


def test_a_dry_run_predicts_the_same_and_writes_nothing(tmp_path, fleet, gleaner, config_file):
    assert gleaner("fleet", "admit", config_file("a"), "--phase-s", 10, "--cycle-s", 300)[0] == 0
    before = connect(str(fleet)).list("")
    arguments = ("fleet", "admit", config_file("b"), "--phase-s", 10, "--cycle-s", 200, "--switch-s", 1)
    code, tried = gleaner(*arguments, "--dry-run")
    assert code == 0, tried
    assert connect(str(fleet)).list("") == before
    assert "can be admitted" in tried
    assert gleaner(*arguments)[1] == tried.replace("can be admitted", "is admitted")
    assert len(connect(str(fleet)).list("")) == len(before) + 1
    predicted = {line.split()[1]: float(line.split()[0]) for line in tried.splitlines() if line.startswith("  ")}
    assert predicted.keys() == {f"{tmp_path}/runs/a", f"{tmp_path}/runs/b"}
    assert all(1.0 <= slowdown < 1.1 for slowdown in predicted.values())


def test_another_teams_runs_are_called_by_their_ids(tmp_path, gleaner, config_file):
    both = tmp_path / "both"
    assert gleaner("fleet", "init", both, "--runs", tmp_path / "runs", "--runs", tmp_path / "theirs")[0] == 0
    trainer = {"fleet": str(both)}
    theirs = str(tmp_path / "theirs" / "x")
    assert gleaner("fleet", "admit", config_file("x", trainer=trainer, run={"url": theirs}), *PROFILE)[0] == 0
    file = config_file("a", trainer=trainer)
    for options in (("--phase-s", 10, "--cycle-s", 900), ("--phase-s", 250, "--cycle-s", 300)):
        output = gleaner("fleet", "admit", file, *options, "--dry-run")[1]
        assert theirs not in output
        assert fleet_layout.run_id(theirs) in output


def test_a_run_one_step_off_is_admitted_as_such(tmp_path, fleet, gleaner, config_file):
    assert gleaner("fleet", "admit", config_file("a", algorithm={"max_staleness": 2}), *PROFILE)[0] == 0
    url = str(tmp_path / "runs" / "a")
    run = records.read(connect(str(fleet)), AdmittedRun, fleet_layout.admitted(fleet_layout.run_id(url)))
    assert run.rollouts_ahead == 2


@pytest.mark.parametrize(
    ("sections", "options", "said"),
    [
        (
            {"trainer": {"placement": "own", "fleet": None}},
            PROFILE,
            "trainer.placement: value 'own'; allowed",
        ),
        ({"run": {"url": "/elsewhere"}}, PROFILE, "run.url: value '/elsewhere'; allowed in this fleet: below "),
        ({}, ("--phase-s", 60), "--cycle-s: value missing; allowed: seconds above 0"),
        ({}, ("--phase-s", -1, "--cycle-s", 9), "phase_s: value -1.0; allowed: finite and above 0"),
        ({}, (*PROFILE, "--share", 0), "share: value 0.0; allowed: finite and above 0"),
        ({}, (*PROFILE, "--wait", "--dry-run"), "--wait: value given with --dry-run; allowed: one of them"),
        ({"trainer": {"fleet": "/no/fleet"}}, PROFILE, "/no/fleet holds no fleet; make one by: gleaner fleet init"),
    ],
)
def test_what_cannot_be_admitted_is_refused_in_one_line(fleet, gleaner, config_file, sections, options, said):
    code, output = gleaner("fleet", "admit", config_file(**sections), *options)
    assert code == 1
    assert said in output
    assert output.count("\n") == 1
    assert connect(str(fleet)).list(fleet_layout.RUNS) == []


def test_runs_that_wait_to_be_admitted_are_shown_until_they_wait_no_longer(tmp_path, fleet, gleaner):
    clock = ManualClock()
    waiting = Waiting(*open_fleet(str(fleet)), "runs/w", clock)
    waiting.beat_if_due()
    clock.advance(50.0)
    waiting.beat_if_due()
    output = gleaner("fleet", "status", fleet)[1]
    assert "runs/w" in output
    assert "waits to be admitted, for 50 s" in output
    waiting.end()
    assert "runs/w" not in gleaner("fleet", "status", fleet)[1]


def test_a_run_that_its_fleet_has_not_admitted_is_not_planned(tmp_path, config_file, fleet, gleaner):
    file = config_file()
    config = parse(yaml.safe_load(file.read_text()))
    with pytest.raises(LookupError, match=r"which has not admitted .* admit it by: gleaner fleet admit CONFIG"):
        prepare(config, EXECUTION, ManualClock())
    assert not (tmp_path / "runs").exists()
    assert gleaner("fleet", "admit", file, *PROFILE)[0] == 0
    assert prepare(config, EXECUTION, ManualClock())[0].iteration == 0


def test_a_fleet_is_not_made_for_an_empty_prefix_that_any_path_would_lie_below(tmp_path, gleaner):
    """As of a variable of the shell that is not set."""
    code, output = gleaner("fleet", "init", tmp_path / "new", "--runs", "")
    assert (code, output) == (
        1,
        "gleaner: --runs: value ''; allowed: a path or a url, below which runs may be admitted\n",
    )
    assert not (tmp_path / "new").exists()


def test_commands_on_no_fleet_say_so(tmp_path, gleaner):
    for arguments in (
        ("status", tmp_path),
        ("report", tmp_path),
        ("leave", tmp_path, "x"),
        ("host", tmp_path, "--memory-gib", 1),
    ):
        code, output = gleaner("fleet", *arguments)
        assert (code, output.count("\n")) == (1, 1)
        assert "holds no fleet" in output


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("--hours", "much"), ("--backfill-s", 0), ("--backfill-s", -5), ("--memory-gib", "much")),
        *(("--memory-gib", "nan"), ("--memory-gib", "inf"), ("--memory-gib", -1), ("--hours", "nan"), ("--hours", -1)),
        *(("--poll-interval-s", "inf"), ("--poll-interval-s", 0), ("--usd-per-hour", "nan"), ("--backfill-s", 1e300)),
    ],
)
def test_a_host_refuses_options_that_cannot_be(fleet, gleaner, option, value):
    code, output = gleaner("fleet", "host", fleet, "--memory-gib", 1, option, value)
    assert code == 2
    assert f"Invalid value for '{option}'" in output
    assert not list((fleet / "hosts").glob("*"))


def test_the_state_that_a_run_needs_in_memory_is_estimated(model, config_file):
    def estimated(**sections):
        return expected_state_bytes(parse(yaml.safe_load(config_file(**sections).read_text())), model)

    plain = estimated()
    assert plain > 0
    assert estimated(algorithm={"kl_coef": 0.1}) * 3 == plain * 4
    assert estimated(algorithm={"advantage_estimator": "gae"}) == plain * 2
    assert estimated(lora={"rank": 2}) * 3 == plain
    # Float32 weights of two teachers as large as the policy.
    teacher = {"column": "answer", "paths": {"first": str(model), "second": str(model), "copied": "/nowhere"}}
    assert estimated(teacher=teacher) * 3 == plain * 5


GPUS = {"pools": {"rollout": {"count": 2, "gpus": 2}, "train": {"gpus": 4}}, "trainer": {"nproc_per_node": 4}}


def test_a_report_shows_the_bound_first_and_then_who_paid_what(tmp_path, fleet, gleaner, config_file):
    for name in ("a", "b"):
        assert gleaner("fleet", "admit", config_file(name, **GPUS), *PROFILE, "--switch-s", 0)[0] == 0
    store = connect(str(fleet))
    host = HostRecord(incarnation="0" * 32, machine="gpu-1", memory_bytes=1, usd_per_hour=3.0, began_at_s=0.0)
    records.put(store, fleet_layout.host(host.incarnation), host)
    urls = [str(tmp_path / "runs" / name) for name in ("a", "b")]
    ids = [fleet_layout.run_id(url) for url in urls]
    trained = SpentEntry(kind="train", run=ids[0], iteration=0, began_s=0.0, ended_s=5400.0)
    read = RestoredState(run=ids[0], iteration=0, tier="local disk", ahead=True, seconds=12.5, num_bytes=3 << 29)
    spent = SpentRecord(
        host=host.incarnation, sequence=0, entries=(trained,), seated=tuple(sorted(ids)), restored=(read,)
    )
    records.put(store, fleet_layout.spent(host.incarnation, 0), spent)
    code, output = gleaner("fleet", "report", fleet)
    assert code == 0, output
    [line] = [line for line in output.splitlines() if "local disk" in line]
    assert [word.strip() for word in line.split("│")[3:-1]] == ["local disk", "0", "1", "12.5", "1.50"]
    assert output.startswith("Sharing saves at most 25.0 % of all GPU-hours.")
    assert "gpu-1" in output
    code, output = gleaner("fleet", "report", fleet, "--json")
    found = json.loads(output)
    assert {run["name"]: (run["hours"], run["usd"]) for run in found["runs"]} == {
        urls[0]: (1.5, 4.5),
        urls[1]: (0.0, 0.0),
    }
    assert all((run["ranks"], run["device_hours_per_step"]) == (4, None) for run in found["runs"])
    assert found["hosts"][0]["paid_by"] == [{"name": urls[0], "hours": 1.5, "usd": 4.5}]
    assert found["hosts"][0]["tiers"] == [
        {"tier": "local disk", "phases": 0, "ahead": 1, "seconds": 12.5, "num_bytes": 3 << 29}
    ]
    assert found["bound"] == 0.25
    assert {(run["iterations"], run["slowdown"]) for run in found["runs"]} == {(0, None)}


def test_a_report_calls_other_teams_runs_by_id(tmp_path, gleaner, config_file):
    both = tmp_path / "both"
    gleaner("fleet", "init", both, "--runs", tmp_path / "runs", "--runs", tmp_path / "theirs")
    urls = [str(tmp_path / "runs" / "a"), str(tmp_path / "theirs" / "x")]
    for name, url in zip("ax", urls, strict=True):
        file = config_file(name, trainer={"fleet": str(both)}, run={"url": url})
        assert gleaner("fleet", "admit", file, "--phase-s", 10, "--cycle-s", 900)[0] == 0
    output = gleaner("fleet", "report", both, "--json")[1]
    assert not any(url in output for url in urls)
    output = gleaner("fleet", "report", both, "--json", "--as", urls[0])[1]
    assert urls[0] in output
    assert urls[1] not in output
    assert fleet_layout.run_id(urls[1]) in output
