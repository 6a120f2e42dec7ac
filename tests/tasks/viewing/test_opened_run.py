"""A run as Python reads it: what gleaner.open gives equals what the commands write, and bad input is one line."""

import json
import re

import pyarrow.parquet as pq
import pytest

import gleaner
from storage.records import layout, records
from storage.records.records import ReportRecord, SettingsRecord
from storage.records.run import read_run
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.reporting.export import export_rollouts
from tasks.reporting.metrics_lines import write_metrics
from tests.committed_runs import TOKENS, begin, plan_iteration, run_of
from tests.small_run import memory_store
from tests.viewed_run import CONFIG, write_viewed_run


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    """Iteration 0 is compacted, 1 is committed, 2 is under way."""
    return write_viewed_run(str(tmp_path_factory.mktemp("opened") / "run"), tmp_path_factory.mktemp("model")).url


@pytest.fixture
def begun():
    """(run, store) without any iteration."""
    store = memory_store("begun")
    begin(store, config=CONFIG)
    return gleaner.open("memory://begun"), store


@pytest.mark.slow
def test_responses_are_the_table_that_an_export_writes(url, tmp_path):
    run = gleaner.open(url)
    assert list(run.iterations) == [0, 1]
    for iteration in run.iterations:  # compacted, and from the journal
        table = run.responses(iteration)
        [file] = export_rollouts(connect(url), str(iteration), tmp_path)
        assert table.to_pylist() == pq.read_table(file.path).to_pylist()
        assert table["token_ids"].to_pylist() == [TOKENS[response] for response in range(4)]
    frame = run.responses(1).to_pandas()
    assert frame.groupby("group").reward.mean().tolist() == [0.125, 0.625]
    assert "=" not in frame.completion[0]  # text, decoded without the prompt
    assert isinstance(frame.completion[0], str)


@pytest.mark.slow
def test_a_run_on_s3_is_read_as_one_in_a_directory(url, s3_url, tmp_path):
    write_viewed_run(f"{s3_url}/opened", tmp_path)
    here, there = gleaner.open(url), gleaner.open(f"{s3_url}/opened")
    assert repr(there) == f"gleaner.open('{s3_url}/opened')"
    assert there.iterations == here.iterations
    assert there.config == here.config
    assert there.metrics.equals(here.metrics)
    assert all(there.responses(iteration).equals(here.responses(iteration)) for iteration in here.iterations)


@pytest.mark.slow
def test_responses_by_several_parts_are_one_table(url, monkeypatch):
    whole = gleaner.open(url).responses(1)
    monkeypatch.setattr("tasks.reporting.export.read_parts", _response_by_response)
    parts = gleaner.open(url).responses(1)
    assert parts["response"].num_chunks > 2
    assert parts.to_pylist() == whole.to_pylist()


def _response_by_response(store, iteration):
    from storage.journal.compaction import read_parts  # noqa: PLC0415 - not the one that is replaced

    return read_parts(store, iteration, part_tokens=1)


def test_metrics_are_the_lines_of_the_file_whether_it_is_there_or_not(url):
    run, store = gleaner.open(url), connect(url)
    before = run.metrics.to_pylist()
    assert [(row["iteration"], row["weight_version"], row["reward"]) for row in before] == [(0, 1, 0.375), (1, 2, 0.5)]
    assert [row["rollout/tokens_per_s"] for row in before] == [2.0, 2.0]
    write_metrics(store)
    assert run.metrics.to_pylist() == before
    for line, row in zip(store.get(layout.METRICS).splitlines(), before, strict=True):
        assert json.loads(line).items() <= row.items()
    store.delete(layout.METRICS)


def test_a_metric_that_one_iteration_lacks_or_that_is_no_number_is_null():
    store = memory_store("lacking")
    run_of(store, 2)
    for iteration, metrics in enumerate(({"reward": float("nan")}, {"reward": 0.5, "evaluation/score": 1.0})):
        _change_report(store, iteration, metrics)
    table = gleaner.open("memory://lacking").metrics
    assert table.column_names == ["iteration", "weight_version", "time_s", "evaluation/score", "reward"]
    assert table["reward"].to_pylist() == [None, 0.5]
    assert table["evaluation/score"].to_pylist() == [None, 1.0]
    assert table.to_pandas().set_index("iteration").reward[1] == 0.5


def _change_report(store, iteration, metrics):
    from dataclasses import replace  # noqa: PLC0415

    report = records.read(store, ReportRecord, layout.report(iteration))
    records.put(store, layout.report(iteration), replace(report, metrics=metrics))


def test_a_run_without_iterations_has_empty_tables_and_its_own_configuration(begun):
    run, _ = begun
    assert list(run.iterations) == []
    assert run.metrics.num_rows == 0
    assert run.metrics.column_names == ["iteration", "weight_version", "time_s"]
    assert run.config == CONFIG
    assert repr(run) == "gleaner.open('memory://begun')"
    with pytest.raises(LookupError, match=r"^iteration: value 0; allowed: none, as none is committed yet$"):
        run.responses(0)


def test_the_configuration_is_that_of_the_last_execution_on_the_newest_iteration(begun):
    run, store = begun
    plan_iteration(store, 0)
    assert run.config == CONFIG
    records.put(store, layout.settings(0), SettingsRecord(config={"rollout": {"claim_ttl_s": 77.0}}))
    assert run.config == {**CONFIG, "rollout": {**CONFIG["rollout"], "claim_ttl_s": 77.0}}
    assert read_run(store).config == CONFIG


@pytest.mark.parametrize("iteration", [3, -1, "1", 0.5, None])
def test_an_iteration_that_does_not_exist_is_refused_in_one_line(url, iteration):
    line = f"iteration: value {iteration!r}; allowed: 0 to 1, which are committed"
    with pytest.raises(LookupError, match=f"^{re.escape(line)}$"):
        gleaner.open(url).responses(iteration)


def test_an_iteration_under_way_is_refused_with_what_shows_it(url):
    line = f"iteration: value 2; allowed: 0 to 1, which are committed; `gleaner view {url}` shows it as far as it goes"
    with pytest.raises(LookupError, match=f"^{re.escape(line)}$"):
        gleaner.open(url).responses(2)


def test_what_is_no_run_is_refused_in_one_line(tmp_path):
    with pytest.raises(LookupError, match=r"^\S+/none holds no run$"):
        gleaner.open(str(tmp_path / "none"))
    with pytest.raises(ValueError, match=r"^storage URL: value 'gcs://bucket'; allowed: .*$"):
        gleaner.open("gcs://bucket")
    assert list(tmp_path.iterdir()) == []


def test_a_run_of_another_format_version_is_refused_in_one_line():
    store = memory_store("future")
    begin(store)
    document = json.loads(store.get(layout.RUN))
    store.put(layout.RUN, json.dumps(document | {"format": document["format"] + 1}).encode())
    with pytest.raises(CorruptObject, match=r"^[^\n]*format[^\n]*$"):
        gleaner.open("memory://future")


@pytest.mark.slow
def test_the_model_is_loaded_as_it_was_published(model):
    import torch  # noqa: PLC0415 - the other tests need it not

    from storage.clock import ManualClock  # noqa: PLC0415
    from storage.records import model_files  # noqa: PLC0415
    from storage.weights.versions import pull_version  # noqa: PLC0415
    from tasks.preparing.first_weights import publish_initial  # noqa: PLC0415
    from tasks.sampling.engines.weight_tensors import as_torch  # noqa: PLC0415

    store = memory_store("loaded", MemoryStore("loaded"))
    begin(store, {path.name: path.read_bytes() for path in model.iterdir() if path.suffix in model_files.SUFFIXES})
    publish_initial(store, model)
    run = gleaner.open("memory://loaded")
    loaded = run.model(0)
    published = {name: as_torch(block) for name, block in pull_version(store, 0, None, ManualClock())[1].items()}
    assert published
    assert all(torch.equal(loaded.state_dict()[name], tensor) for name, tensor in published.items())
    assert run.model().dtype == loaded.dtype
    with pytest.raises(LookupError, match=r"^version: weight version 1 is not published; allowed: 0$"):
        run.model(1)
