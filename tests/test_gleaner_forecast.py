"""The command `gleaner forecast`, and the Flyte task and workflow beside it."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from storage.records import layout, records
from storage.records.forecast_records import ForecastRecord
from storage.stores.connect import connect
from tasks.forecasting import comparison
from tasks.forecasting.setups import setups
from tests.committed_runs import begin
from tests.forecast_documents import document
from tests.tasks.forecasting.test_realised import commit
from workflows.forecast import forecast

ROOT = Path(__file__).parents[1]


def gleaner(*arguments: Any) -> Any:
    return CliRunner().invoke(main, ["forecast", *map(str, arguments)], catch_exceptions=False)


@pytest.fixture
def config(tmp_path: Path) -> Path:
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(document(str(tmp_path / "run"), forecast={"widths": [2]})))
    return file


def test_a_forecast_needs_nothing_and_leaves_nothing(config: Path, tmp_path: Path):
    result = gleaner(config)
    assert result.exit_code == 0
    assert "Recommended: " in result.stdout
    assert result.stderr == ""
    assert [path.name for path in tmp_path.iterdir()] == ["config.yaml"]


@pytest.mark.slow
def test_json_is_the_record_that_is_saved(config: Path, tmp_path: Path):
    result = gleaner(config, "--json", "--save")
    assert result.exit_code == 0
    store = connect(str(tmp_path / "run"))
    [key] = store.list(layout.FORECASTS)
    assert f"written: {key}" in result.stderr
    assert json.loads(result.stdout) == json.loads(store.get(key))["body"]
    assert records.read(store, ForecastRecord, key).recommended in [
        one["name"] for one in json.loads(store.get(key))["body"]["setups"]
    ]


@pytest.mark.slow
def test_what_cannot_be_saved_was_at_least_shown(config: Path, tmp_path: Path):
    (tmp_path / "run").write_text("a file")
    result = gleaner(config, "--no-probe", "--save")
    assert result.exit_code == 1
    assert "Recommended: " in result.stdout
    assert result.stderr.splitlines()[-1].startswith("gleaner: ")
    assert "written" not in result.stderr


@pytest.mark.slow
def test_what_was_saved_is_held_against_what_happened(config: Path, tmp_path: Path):
    gleaner(config, "--save")
    run = tmp_path / "run"
    begin(connect(str(run)))
    result = gleaner("--realised", run)
    assert (result.exit_code, result.stdout) == (1, "")
    assert "holds no iteration that was begun after the forecast" in result.stderr
    store = connect(str(run))
    [key] = store.list(layout.FORECASTS)
    commit(store, 0, began_s=records.read(store, ForecastRecord, key).created_at_s + 1)
    assert "1 iterations against the forecast for 'as configured'" in gleaner("--realised", run).stdout
    told = json.loads(gleaner("--realised", run, "--json").stdout)
    assert told["iterations"] == 1
    assert [row["name"] for row in told["rows"]] == ["hours", "dollars", "tokens/s", "$ per million tokens"]


@pytest.mark.parametrize("arguments", [(), ("--save", "--realised", "x"), ("a.yaml", "--realised", "x")])
def test_what_does_not_belong_together_is_refused(arguments: tuple[str, ...]):
    result = gleaner(*arguments)
    assert result.exit_code == 1
    assert result.stderr.startswith("gleaner: forecast: allowed: CONFIG [--save]")


def test_what_is_missing_is_named_without_a_traceback(config: Path):
    settings = yaml.safe_load(config.read_text())
    del settings["forecast"]["parameters_billions"]
    config.write_text(yaml.safe_dump(settings))
    result = gleaner(config)
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("gleaner: forecast.parameters_billions: missing; allowed: ")


@pytest.mark.slow
def test_the_workflow_says_the_same_and_saves(config: Path, tmp_path: Path):
    settings = yaml.safe_load(config.read_text())
    assert forecast(config=settings, save=True) == gleaner(config).stdout
    assert len(list(connect(str(tmp_path / "run")).list(layout.FORECASTS))) == 1


@pytest.mark.slow
def test_the_table_and_the_sentence_of_the_readme_are_what_the_command_prints(monkeypatch: pytest.MonkeyPatch):
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    table = readme.partition("| setup | hours |")[2].partition("\n\n")[0].splitlines()[2:]
    shown = {name: cells for name, *cells in (re.split(r" *\| *", row.strip("| ")) for row in table)}
    [(file, options)] = re.findall(r"`gleaner forecast (examples/\S+) (--no-probe)`", readme)
    # A setup is simulated by itself, so those which the table leaves out need not be.
    counted = []

    def of_readme(*arguments: Any) -> Any:
        compared = setups(*arguments)
        counted.append(len(compared))
        return tuple(setup for setup in compared if setup.name in shown)

    monkeypatch.setattr(comparison, "setups", of_readme)
    monkeypatch.setattr(comparison, "SENSITIVITY", ())
    monkeypatch.chdir(ROOT)
    printed = gleaner(file, options).stdout.partition("dollars, by what they are spent on")[0]
    rows = [re.split(r" *│ *", line.strip("│ ")) for line in printed.splitlines() if line.startswith("│")]
    found = {row[0].removesuffix(" *"): [*row[2:4], row[5]] for row in rows if len(row) == 6}
    assert found == shown
    assert (counted, len(shown)) == ([11], 4)
    assert "four of eleven setups" in " ".join(readme.split())
    alone, standing = (
        [float(cell.split()[0].replace(",", "")) for cell in shown[name]]
        for name in ("reserved only", "spot standing, 16")
    )
    shorter, cheaper = (round(100 * (1 - standing[part] / alone[part])) for part in (0, 1))
    assert (
        f"16 spot GPUs with a standing crew make the run {shorter} % shorter than reserved GPUs alone, for {cheaper} % "
        "less money."
    ) in " ".join(readme.split())
