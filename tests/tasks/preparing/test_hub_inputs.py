"""Models and data sets by their ids: from a hub on loopback, from its cache, and from the run that began with them."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from storage.connect import connect
from storage.run import read_plan, read_run
from tests.hub_data import GSM_CARD, parquet_of
from tests.hub_server import TOKEN, Hub, folder_files, running_hub

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
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare

what, config = sys.argv[1], parse(json.loads(sys.argv[2]))
try:
    if what == "check":
        print(json.dumps(check_files(config)))
    else:
        prepare(config, "here", ManualClock())
except ValueError as error:
    sys.exit(f"gleaner: {error}")
"""


def ask(what: str, config: dict[str, object], home: Path, hub: Hub | None, **more: str) -> subprocess.CompletedProcess:
    """A process with the hub's address in its environment; hub None: without the network."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "TRANSFORMERS_"))}
    offline = {"HF_HUB_OFFLINE": "1"} if hub is None else {"HF_ENDPOINT": hub.url}
    environment = {**kept, "HF_HOME": str(home), **offline, **more}
    command = [sys.executable, "-c", PROGRAM, what, json.dumps(config)]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT, check=False)


def refusal(done: subprocess.CompletedProcess) -> str:
    assert done.returncode == 1, done.stdout + done.stderr
    line = next(line for line in done.stderr.splitlines() if line.startswith("gleaner: "))
    assert done.stderr.rstrip().endswith(line)
    return line


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


def test_a_run_begins_with_the_hub_and_goes_on_without_it(hub: Hub, home: Path, tmp_path: Path):
    config = configuration(tmp_path / "run")
    begun = ask("plan", config, home, hub)
    assert begun.returncode == 0, begun.stderr
    store = connect(str(tmp_path / "run"))
    sources = read_run(store).sources
    model, data = hub.repositories["models", MODEL], hub.repositories["datasets", DATA]
    assert (sources["policy.path"].commit, sources["data.source"].commit) == (model.refs["main"], data.refs["main"])
    assert read_plan(store, 0).config["policy"]["path"] == MODEL
    # Neither code nor pickles are asked for.
    assert not any(name in request for request in hub.requests for name in ("modeling.py", "old.bin"))
    # The branch moves on, and this machine has neither network nor cache: the run has its own rows.
    data.commit({"README.md": GSM_CARD, "main/train-00000.parquet": parquet_of([{"question": "new", "answer": "1"}])})
    again = ask("plan", config, tmp_path / "elsewhere", None)
    assert again.returncode == 0, again.stderr
    assert read_run(store).sources == sources


def test_the_caches_do_without_the_network(hub: Hub, home: Path, tmp_path: Path):
    config = configuration(tmp_path / "run")
    seen = ask("check", config, home, hub)
    assert seen.returncode == 0, seen.stderr
    offline = ask("check", config, home, None)
    assert offline.returncode == 0, offline.stderr
    assert offline.stdout == seen.stdout
    assert hub.repositories["models", MODEL].refs["main"] in offline.stdout


def test_a_damaged_file_of_the_cache_is_found(hub: Hub, home: Path, tmp_path: Path):
    config = configuration(tmp_path / "run")
    assert ask("check", config, home, hub).returncode == 0
    weights = next(home.rglob("model.safetensors")).resolve()
    body = bytearray(weights.read_bytes())
    body[-1] ^= 1
    weights.write_bytes(body)
    assert "model.safetensors in the cache is damaged" in refusal(ask("check", config, home, None))


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
        ({"data": {"source": DATA, "subset": "hard", "split": "train"}}, "data.subset: value 'hard'"),
        ({"data": {"source": "openai/none", "split": "train"}}, "data.source: value 'openai/none' is no path here"),
        ({"data": {"source": "evil/paths", "split": "train"}}, "which is not one of its own files"),
    ],
)
def test_what_cannot_be_read_is_one_line(hub: Hub, home: Path, tmp_path: Path, model: Path, changes, expected):
    hub.add("models", "Small/Gated", folder_files(model), gated=True)
    hub.add("models", "Small/Pickled", {"config.json": b"{}", "pytorch_model.bin": b"x"})
    secret = tmp_path / "secret.jsonl"
    secret.write_text('{"prompt": "secret"}\n')
    card = yaml.safe_dump({"configs": [{"config_name": "default", "data_files": str(secret)}]})
    hub.add("datasets", "evil/paths", {"README.md": f"---\n{card}---\n".encode(), "train.jsonl": b'{"prompt": "a"}\n'})
    assert expected in refusal(ask("check", configuration(tmp_path / "run", **changes), home, hub))


def test_without_network_and_cache_the_line_says_so(home: Path, tmp_path: Path):
    line = refusal(ask("check", configuration(tmp_path / "run"), home, None))
    assert f"policy.path: value '{MODEL}' is no path here, is not (or not whole) in the cache" in line
    assert line.endswith("HF_HUB_OFFLINE is set")


def test_a_token_opens_a_gated_model_and_is_written_nowhere(hub: Hub, home: Path, tmp_path: Path, model: Path):
    hub.add("models", "Small/Gated", folder_files(model), gated=True)
    config = configuration(tmp_path / "run", policy={"path": "Small/Gated"})
    begun = ask("plan", config, home, hub, HF_TOKEN=TOKEN)
    assert begun.returncode == 0, begun.stderr
    written = [path for folder in (tmp_path / "run", home) for path in folder.rglob("*") if path.is_file()]
    assert not any(TOKEN.encode() in path.read_bytes() for path in written)
    assert TOKEN not in begun.stdout + begun.stderr


def test_a_path_that_exists_wins(hub: Hub, home: Path, tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    from tasks.configuration.run_config import PolicyConfig  # noqa: PLC0415
    from tasks.preparing.at_hand import inputs_at_hand  # noqa: PLC0415

    (tmp_path / "Small").mkdir()
    (tmp_path / MODEL).symlink_to(model)
    monkeypatch.chdir(tmp_path)
    with inputs_at_hand() as inputs:
        assert inputs.policy(PolicyConfig(path=MODEL)).path == MODEL
        assert not inputs.found
    assert not hub.requests
