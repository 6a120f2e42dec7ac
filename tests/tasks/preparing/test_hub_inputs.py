"""Models and data sets by their ids: from a hub on loopback, from its cache, and from the run that began with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import huggingface_hub
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from storage.clock import ManualClock
from storage.records import layout, model_copies
from storage.records.run import read_plan, read_run
from storage.records.sources import read_rows
from storage.stores.connect import connect
from tasks.configuration.run_config import PolicyConfig, parse
from tasks.hub.data_sets import parquet_pieces
from tasks.hub.repositories import HubError
from tasks.preparing.checks import check_files
from tasks.preparing.findings import Refusals
from tasks.preparing.iteration import prepare
from tasks.preparing.local_inputs import open_local_inputs
from tasks.prompts.csv_rows import CsvRows
from tests.hub_data import GSM_CARD, parquet_of
from tests.hub_server import TOKEN, Hub, folder_files, pointed_to, running_hub
from tests.tasks.grading.tiny_reward_model import save_reward_model

MODEL, DATA = "Small/Tiny-Instruct", "openai/gsm8k"
ROOT = Path(__file__).parents[3]


@pytest.fixture
def hub(model: Path):
    with running_hub() as running:
        running.add("models", MODEL, {**folder_files(model), "modeling.py": b"raise SystemExit", "old.bin": b"pickle"})
        rows = {split: [{"question": f"{split}{i}", "answer": "4"} for i in range(8)] for split in ("train", "test")}
        running.add(
            "datasets",
            DATA,
            {
                "README.md": GSM_CARD,
                **{f"main/{split}-00000.parquet": parquet_of(held) for split, held in rows.items()},
                "socratic/train-00000.parquet": parquet_of([{"question": "why", "answer": "4"}]),
            },
        )
        yield running


def configuration(url: Path, **changes: object) -> dict[str, object]:
    document: dict[str, object] = {
        "run": {"url": str(url), "num_prompts_per_step": 2, "num_generations": 2},
        "policy": {"path": MODEL},
        "data": {"source": DATA, "subset": "main", "split": "train", "prompt_column": "question"},
        "rewards": [{"function": "math"}],
        "sampling": {"max_completion_length": 8},
        "rollout": {"context_length": 64},
    }
    return document | changes


PROGRAM = """
import json, sys
from storage.clock import ManualClock
from tasks.configuration.run_config import parse
from tasks.preparing.iteration import prepare

prepare(parse(json.loads(sys.argv[1])), "here", ManualClock())
"""


def planned(config: dict[str, object], home: Path, **environment: str) -> None:
    """Plan an iteration in a process that reads the hub's address from its environment, as users give it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, json.dumps(config)],
        env={**kept, "HF_HOME": str(home), **environment},
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "%|" not in done.stderr, "a progress bar, though this is no terminal"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.mark.slow
def test_a_run_begins_with_the_hub_and_goes_on_without_it(hub: Hub, home: Path, tmp_path: Path):
    config = configuration(tmp_path / "run")
    planned(config, home, HF_ENDPOINT=hub.url)
    store = connect(str(tmp_path / "run"))
    sources = read_run(store).sources
    model, data = hub.repositories["models", MODEL], hub.repositories["datasets", DATA]
    assert (sources["policy.path"].commit, sources["data.source"].commit) == (model.refs["main"], data.refs["main"])
    assert read_plan(store, 0).config["policy"]["path"] == MODEL
    # Neither code nor pickles are asked for.
    assert not any(name in request for request in hub.requests for name in ("modeling.py", "old.bin"))
    # The branch moves on, and this machine has neither network nor cache: the run has its own rows.
    data.commit({"README.md": GSM_CARD, "main/train-00000.parquet": parquet_of([{"question": "new", "answer": "1"}])})
    planned(config, tmp_path / "elsewhere", HF_HUB_OFFLINE="1")
    assert read_run(store).sources == sources


@pytest.mark.slow
def test_a_teacher_by_its_id_is_copied_into_the_run_which_goes_on_without_the_hub(hub: Hub, home: Path, tmp_path: Path):
    several = {"paths": {"math": MODEL}, "column": "subject"}
    rows = parquet_of([{"question": "q", "answer": "4", "subject": "math"}])
    files = {f"main/{split}-00000.parquet": rows for split in ("train", "test")}
    hub.repositories["datasets", DATA].commit({"README.md": GSM_CARD, **files})
    for name, teacher in (("teacher.path", {"path": MODEL, "revision": "main"}), ("teacher.paths.math", several)):
        config = configuration(tmp_path / name, teacher=teacher)
        planned(config, home, HF_ENDPOINT=hub.url)
        store = connect(str(tmp_path / name))
        assert read_run(store).sources[name].commit == hub.repositories["models", MODEL].refs["main"]
        assert [key.split("/")[1] for key in store.list(layout.TEACHERS) if key.endswith("/manifest.json")] == [
            "teacher" if name == "teacher.path" else "math"
        ]
        planned(config, tmp_path / "elsewhere", HF_HUB_OFFLINE="1")


@pytest.mark.slow
def test_a_draft_model_by_its_id_is_copied_and_a_later_one_needs_a_commit(hub: Hub, home: Path, tmp_path: Path):
    commit = hub.repositories["models", MODEL].refs["main"]

    def config(**speculation: object) -> dict[str, object]:
        drafts = {"drafts": "auto", "source": "draft_model", "draft_model": MODEL, **speculation}
        return configuration(tmp_path / "run", rollout={"context_length": 64, "speculation": drafts})

    planned(config(), home, HF_ENDPOINT=hub.url)
    store = connect(str(tmp_path / "run"))
    assert read_run(store).sources["rollout.speculation.draft_model"].commit == commit
    copy = parse(config()).rollout.speculation.model_copy
    assert model_copies.stored(store, copy) is not None
    planned(config(), tmp_path / "elsewhere", HF_HUB_OFFLINE="1")
    with pointed_to(hub, home), pytest.raises(HubError, match=r"rollout\.speculation\.revision: value 'main'; allowed"):
        prepare(parse(config(revision="main")), "here", ManualClock())
    planned(config(revision=commit), home, HF_ENDPOINT=hub.url)
    assert model_copies.stored(store, parse(config(revision=commit)).rollout.speculation.model_copy) is not None


@pytest.mark.slow
def test_the_caches_do_without_the_network(hub: Hub, home: Path, tmp_path: Path):
    config = parse(configuration(tmp_path / "run"))
    with pointed_to(hub, home):
        seen = check_files(config)
    asked = len(hub.requests)
    with pointed_to(None, home):
        offline = check_files(config)
    # How long the model was tried is never twice the same.
    assert [line.partition(" in trainer")[0] for line in offline] == [line.partition(" in trainer")[0] for line in seen]
    assert hub.repositories["models", MODEL].refs["main"] in " ".join(offline)
    assert len(hub.requests) == asked


@pytest.mark.slow
def test_a_damaged_file_of_the_cache_is_found(hub: Hub, home: Path, tmp_path: Path):
    config = parse(configuration(tmp_path / "run"))
    with pointed_to(hub, home):
        check_files(config)
    weights = next(home.rglob("model.safetensors")).resolve()
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    with pointed_to(None, home), pytest.raises(HubError, match=r"model\.safetensors in the cache is damaged"):
        check_files(config)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"policy": {"path": "Small/None"}}, "policy.path: value 'Small/None' is no path here, and http"),
        (
            {"policy": {"path": MODEL, "revision": "v9"}},
            "policy.revision: value 'v9'; allowed: a branch, a tag or a commit",
        ),
        ({"policy": {"path": "Small/Gated"}}, "policy.path: value 'Small/Gated' is gated at http"),
        ({"policy": {"path": "Small/Pickled"}}, "holds no .safetensors file; pytorch_model.bin is a pickle"),
        (
            {"data": {"source": DATA, "subset": "main", "split": "dev"}},
            "data.split: value 'dev'; allowed: 'train', 'test'",
        ),
        (
            {"data": {"source": DATA, "subset": "hard", "split": "train"}},
            "data.source: value 'openai/gsm8k' with subset 'hard': ValueError: BuilderConfig 'hard' not found",
        ),
        ({"data": {"source": "openai/none", "split": "train"}}, "data.source: value 'openai/none' is no path here"),
        ({"data": {"source": "evil/paths", "split": "train"}}, "Data files don't belong to evil/paths"),
    ],
)
def test_what_cannot_be_read_is_one_line(hub: Hub, home: Path, tmp_path: Path, model: Path, changes, expected):
    hub.add("models", "Small/Gated", folder_files(model), gated=True)
    hub.add("models", "Small/Pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    add_reaching_out(hub, tmp_path)
    with pointed_to(hub, home), pytest.raises(HubError) as refused:
        check_files(parse(configuration(tmp_path / "run", **changes)))
    assert expected in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1


def add_reaching_out(hub: Hub, tmp_path: Path) -> None:
    """Add evil/paths, a data set whose card names a file of this machine."""
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"prompt": "secret"}\n')
    card = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": str(secret)}]})
    hub.add("datasets", "evil/paths", {"README.md": f"---\n{card}---\n".encode(), "train.jsonl": b'{"prompt": "a"}\n'})


def test_a_card_in_the_cache_names_no_file_outside_of_it(hub: Hub, home: Path, tmp_path: Path):
    add_reaching_out(hub, tmp_path)
    commit = hub.repositories["datasets", "evil/paths"].refs["main"]
    with pointed_to(hub, home):
        huggingface_hub.snapshot_download("evil/paths", repo_type="dataset", revision=commit)
    with pointed_to(None, home), pytest.raises(HubError, match="which is not one of its own files"):
        parquet_pieces("evil/paths", commit, None, "train", "data")


@pytest.mark.slow
def test_a_csv_file_of_the_hub_has_the_values_of_one_on_disk(hub: Hub, home: Path, tmp_path: Path):
    body = '\ufeffquestion,answer\n"a\nb",007\nc,\n'
    (tmp_path / "rows.csv").write_text(body)
    hub.add("datasets", "some/sums", {"train.csv": body.encode()})
    hub.add("datasets", "some/shifted", {"train.csv": b"question,answer\na,4,5\nb,6,7\n"})
    commits = {name: hub.repositories["datasets", name].refs["main"] for name in ("some/sums", "some/shifted")}
    with pointed_to(hub, home):
        (piece,) = parquet_pieces("some/sums", commits["some/sums"], None, "train", "data")
        with pytest.raises(HubError, match=r"data\.source: value 'some/shifted' has records with more fields than the"):
            parquet_pieces("some/shifted", commits["some/shifted"], None, "train", "data")
    here = CsvRows(tmp_path / "rows.csv")
    assert pq.read_table(pa.BufferReader(piece)).to_pylist() == [dict(here.row(0)), dict(here.row(1))]


def test_without_network_and_cache_the_line_says_so(home: Path, tmp_path: Path):
    with pointed_to(None, home), pytest.raises(Refusals) as refused:
        check_files(parse(configuration(tmp_path / "run")))
    lines = str(refused.value).splitlines()
    for line, given in zip(lines, (f"policy.path: value '{MODEL}'", f"data.source: value '{DATA}'"), strict=True):
        assert line.startswith(f"{given} is no path here, is not (or not whole) in the cache")
        assert line.endswith("HF_HUB_OFFLINE is set")


@pytest.mark.slow
def test_a_token_opens_a_gated_model_and_is_written_nowhere(
    hub: Hub,
    home: Path,
    tmp_path: Path,
    model: Path,
    capfd: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
):
    hub.add("models", "Small/Gated", folder_files(model), gated=True)
    config = configuration(tmp_path / "run", policy={"path": "Small/Gated"})
    with caplog.at_level("DEBUG"), pointed_to(hub, home, token=TOKEN):
        prepare(parse(config), "here", ManualClock())
    assert TOKEN in hub.tokens
    written = [path for folder in (tmp_path / "run", home) for path in folder.rglob("*") if path.is_file()]
    assert written
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)
    shown = capfd.readouterr()
    assert TOKEN not in shown.out + shown.err + caplog.text


def test_a_path_that_exists_wins(hub: Hub, home: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "Small").mkdir()
    (tmp_path / MODEL).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    with pointed_to(hub, home), open_local_inputs() as inputs:
        assert inputs.policy(PolicyConfig(path=MODEL)).path == MODEL
        assert not inputs.found
    assert not hub.requests


@pytest.mark.slow
def test_held_out_prompts_and_a_reward_model_come_from_the_hub(hub: Hub, home: Path, tmp_path: Path):
    hub.add("models", "Small/Judge", folder_files(save_reward_model(tmp_path / "judge")))
    held_out = {"source": DATA, "subset": "main", "split": "test", "prompt_column": "question"}
    config = configuration(
        tmp_path / "run",
        rewards=[{"function": "reward_model", "model": "Small/Judge"}],
        evaluation={"data": held_out, "interval": 1, "sampling": {"max_completion_length": 8}},
    )
    with pointed_to(hub, home):
        prepare(parse(config), "here", ManualClock())
    store = connect(str(tmp_path / "run"))
    sources = read_run(store).sources
    judge = hub.repositories["models", "Small/Judge"].refs["main"]
    assert sources["rewards.reward_model.model"].commit == judge
    held = sources["evaluation.data.source"]
    assert held.split == "test"
    rows = pq.read_table(pa.BufferReader(read_rows(store, held)[0])).to_pylist()
    assert [row["question"] for row in rows] == [f"test{i}" for i in range(8)]
