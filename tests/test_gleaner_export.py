"""The commands `gleaner export` and `gleaner sweep`."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from safetensors.numpy import load_file

from gleaner import main
from storage.records import layout, records
from storage.records.records import PlanRecord, RunRecord
from storage.stores.connect import connect
from storage.weights.tensor_sets import TensorBlock, publish
from tasks.configuration.run_config import dump, parse
from tests.committed_runs import begin, run_of

pytestmark = pytest.mark.slow


@pytest.fixture
def run(tmp_path):
    """The url of a run with three committed iterations, whose plans hold a configuration."""
    url = str(tmp_path / "run")
    store = connect(url)
    run_of(store, 3)
    set_retention(store, {})
    return url


def resolved(**sections):
    document = {
        "run": {"url": "memory://x"},
        "policy": {"path": "m"},
        "data": {"source": "arithmetic"},
        "rewards": [{"function": "arithmetic"}],
    }
    return dump(parse(document | sections))


def set_retention(store, retention, **sections):
    run, plan = records.read(store, RunRecord, layout.RUN), records.read(store, PlanRecord, layout.plan(2))
    records.put(store, layout.RUN, replace(run, config=resolved(**sections)))
    records.put(store, layout.plan(2), replace(plan, config=resolved(retention=retention, **sections)))


def gleaner(*arguments):
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def refused(result):
    assert result.exit_code == 1
    assert result.stdout == ""
    [line] = result.stderr.splitlines()
    return line


def test_export_says_what_it_wrote(run, tmp_path):
    result = gleaner("export", "--rollouts", run, "--iterations", "1:", "--to", tmp_path / "out")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        f"{tmp_path}/out/iteration-00000{n}.parquet: 4 of 4 responses of iteration {n}" for n in (1, 2)
    ]
    assert pq.read_table(tmp_path / "out").num_rows == 8


def test_what_export_cannot_do_is_one_line(run, tmp_path):
    out = tmp_path / "out"
    assert refused(gleaner("export", "--rollouts", run, "--iterations", "7", "--to", out)) == (
        "gleaner: iterations: value '7'; allowed: the run has 0 to 2"
    )
    empty = tmp_path / "empty"
    assert refused(gleaner("export", "--rollouts", empty, "--to", out)) == f"gleaner: {empty} holds no run"
    assert refused(gleaner("export", "--rollouts", run, "--grading", "rubric", "--to", out)) == (
        "gleaner: grading: value 'rubric'; allowed: none, as `gleaner regrade` has graded nothing yet"
    )
    assert not out.exists()
    assert gleaner("export", "--rollouts", run, "--to", out).exit_code == 0
    assert "iteration-000000.parquet exists already" in refused(gleaner("export", "--rollouts", run, "--to", out))
    assert gleaner("export", "--rollouts", run, "--to", out, "--overwrite").exit_code == 0
    file = tmp_path / "run" / "run.json"
    assert refused(gleaner("export", "--rollouts", run, "--to", file)).startswith(
        f"gleaner: {file} is a file; allowed: "
    )


MIXED = [
    (),
    ("--rollouts", "--model"),
    ("--rollouts", "--version", 0),
    ("--rollouts", "--dtype", "stored"),
    ("--model", "--iterations", ":"),
    ("--model", "--overwrite"),
    ("--model", "--grading", "rubric"),
    ("--model", "--adapter"),
    ("--adapter", "--rollouts"),
    ("--adapter", "--dtype", "bfloat16"),
    ("--adapter", "--iterations", ":"),
    ("--adapter", "--overwrite"),
]


@pytest.mark.parametrize("options", MIXED, ids=str)
def test_export_is_of_one_of_three_things(run, tmp_path, options):
    assert refused(gleaner("export", run, *options, "--to", tmp_path / "out")) == (
        "gleaner: export: allowed: --rollouts [--iterations a:b] [--grading NAME] [--overwrite], --model [--version N] "
        "[--dtype D], or --adapter [--version N]"
    )
    assert not (tmp_path / "out").exists()


def test_export_of_a_model_says_what_it_wrote(run, tmp_path):
    begin(connect(run), {"config.json": b'{"architectures": ["X"]}'})
    for options, version, size in [((), 3, "12 bytes of float32"), (("--version", 1), 1, "12 bytes of float32")]:
        out = tmp_path / f"{version}"
        result = gleaner("export", "--model", run, "--to", out, *options)
        assert (result.exit_code, result.stderr) == (0, "")
        assert result.stdout == f"{out}: weight version {version}, 3 tensors, {size} in 1 file\n"
        assert [tensor.tobytes()[0] for tensor in load_file(out / "model.safetensors").values()] == [version] * 3
    converted = gleaner("export", "--model", run, "--to", tmp_path / "half", "--dtype", "bfloat16")
    assert "3 tensors, 6 bytes of bfloat16" in converted.stdout


def test_what_the_export_of_a_model_cannot_do_is_one_line(run, tmp_path):
    out, empty = tmp_path / "out", tmp_path / "empty"
    assert refused(gleaner("export", "--model", empty, "--to", out)) == f"gleaner: {empty} holds no run"
    assert refused(gleaner("export", "--model", run, "--to", out)) == (
        f"gleaner: {run} holds no 'model/config.json', without which weights are no model"
    )
    assert gleaner("sweep", run).exit_code == 0
    assert refused(gleaner("export", "--model", run, "--to", out, "--version", 1)) == (
        "gleaner: version: weight version 1 was deleted by the run's retention; allowed: 0, 2, 3"
    )
    assert refused(gleaner("export", "--model", run, "--to", run)) == (
        f"gleaner: {run} is not empty; allowed: an empty folder, or one that is made"
    )
    begin(connect(run), {"config.json": b"{}"})
    key = next(key for key in connect(run).list(layout.weights(3)) if key.endswith(".safetensors"))
    connect(run).put(key, connect(run).get(key)[:-1])
    assert refused(gleaner("export", "--model", run, "--to", out)).startswith(f"gleaner: object '{key}' is corrupt: ")
    unknown = gleaner("export", "--model", run, "--to", out, "--dtype", "int8")
    assert (unknown.exit_code, "'stored', 'bfloat16', 'float32', 'float16'" in unknown.stderr) == (2, True)
    assert not out.exists()


def test_export_of_an_adapter_says_what_it_wrote(tmp_path):
    store, out = connect(str(tmp_path / "run")), tmp_path / "out"
    begin(store, config=resolved(lora={"rank": 2}))
    publish(store, layout.weights(0), {"a.weight": TensorBlock("F32", (4, 3), bytes(48))}, {})
    names = {letter: f"parameter.a.lora_{letter}.default.weight" for letter in "AB"}
    factors = {names["A"]: TensorBlock("F32", (2, 3), bytes(24)), names["B"]: TensorBlock("F32", (4, 2), bytes(32))}
    publish(store, layout.checkpoint(1), factors, {})
    result = gleaner("export", "--adapter", tmp_path / "run", "--to", out, "--version", 1)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{out}: adapter of weight version 1, rank 2, 1 layer, 56 bytes of float32\n"
    held = {name: tensor.shape for name, tensor in load_file(out / "adapter_model.safetensors").items()}
    assert held == {"base_model.model.a.lora_A.weight": (2, 3), "base_model.model.a.lora_B.weight": (4, 2)}


def test_what_the_export_of_an_adapter_cannot_do_is_one_line(run, tmp_path):
    begin(connect(run), config=resolved())
    assert refused(gleaner("export", "--adapter", run, "--to", tmp_path / "out")) == (
        f"gleaner: lora: value null in the configuration of {run}, which trains the whole policy; allowed: a section "
        "lora; --model exports the policy"
    )
    set_retention(connect(run), {}, lora={})
    assert gleaner("sweep", run).exit_code == 0
    assert refused(gleaner("export", "--adapter", run, "--to", tmp_path / "out", "--version", 1)) == (
        "gleaner: version: checkpoint 1 was deleted by the run's retention, or never stored "
        "(trainer.checkpoint_interval); allowed: 2, 3"
    )
    assert not (tmp_path / "out").exists()


def test_sweep_first_tells_then_does(run):
    store = connect(run)
    before = store.list("")
    told = gleaner("sweep", run, "--dry-run")
    assert told.exit_code == 0
    assert told.stdout.splitlines() == [
        "would have compacted 3 iterations",
        "would have deleted 44 objects: 9 alive, 4 checkpoints, 9 claims, 18 journal, 4 weights",
    ]
    assert store.list("") == before
    done = gleaner("sweep", run)
    assert done.stdout == told.stdout.replace("would have ", "")
    assert gleaner("sweep", run).stdout == "compacted 0 iterations\ndeleted 0 objects\n"
    assert gleaner("status", run).exit_code == 0


def test_sweep_follows_the_configuration_in_force(run):
    set_retention(connect(run), {"compact": False, "keep_weights": 10, "keep_checkpoints": 10})
    assert gleaner("sweep", run).stdout == "compacted 0 iterations\ndeleted 0 objects\n"


def test_sweep_tells_what_it_left_and_fails(run):
    store = connect(run)
    store.put(layout.shard(0, f"00000-{'b' * 16}", 0), b"damaged")
    result = gleaner("sweep", run)
    assert result.exit_code == 1
    assert result.stderr.startswith("left as it is: iteration 0: object 'iterations/000000/journal/")
    assert result.stdout.startswith("compacted 2 iterations\n")


def test_sweep_of_a_run_without_a_committed_iteration(tmp_path):
    url = tmp_path / "begun"
    assert refused(gleaner("sweep", url)) == f"gleaner: {url} holds no run"
    assert not url.exists()
    begin(connect(str(url)))
    assert gleaner("sweep", url).stdout == f"{url} holds no committed iteration; nothing to do\n"
