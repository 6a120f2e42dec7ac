"""What a forecast and a fleet need of a model on the hub: its size, for which no weights are downloaded."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner
from safetensors.torch import save

from gleaner import main
from storage.fleet.fleet_layout import run_id
from storage.fleet.fleet_reading import read_run
from storage.stores.connect import connect
from storage.stores.store import StoreDenied
from tasks.configuration.run_config import load
from tasks.hub.policy_size import hub_parameters, policy_of
from tasks.hub.repositories import HubError, commit_of, count_parameters
from tasks.learning.pretrained import count_parameters as count_in_folder
from tests.forecast_documents import document as forecast_document
from tests.hub_server import Hub, folder_files, pointed_to, running_hub
from tests.small_run import document

MODEL = "Small/Tiny-Instruct"


@pytest.fixture
def hub(model: Path):
    with running_hub() as running:
        running.add("models", MODEL, folder_files(model))
        yield running


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """To forecast, without a size of the model."""
    whole = forecast_document(str(tmp_path / "run"), policy={"path": MODEL}, forecast={"widths": [2]})
    for name in ("parameters_billions", "kv_bytes_per_token"):
        del whole["forecast"][name]
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(whole))
    return file


def gleaner(*arguments: object) -> tuple[int, str]:
    done = CliRunner().invoke(main, [str(each) for each in arguments])
    return done.exit_code, done.output


def test_a_forecast_reads_the_size_from_the_hub_and_nothing_else(hub: Hub, config: Path, tmp_path: Path, model: Path):
    with pointed_to(hub, tmp_path / "home"):
        code, output = gleaner("forecast", config, "--json")
    assert code == 0, output
    [shown] = [each for each in json.loads(output)["inputs"] if each["name"] == "model"]
    assert hub.repositories["models", MODEL].refs["main"] in shown["source"]
    assert list(hub.sent) == ["config.json"]
    local = yaml.safe_load(config.read_text()) | {"policy": {"path": str(model)}}
    config.write_text(yaml.safe_dump(local))
    code, output = gleaner("forecast", config, "--json")
    [there] = [each for each in json.loads(output)["inputs"] if each["name"] == "model"]
    assert there["value"] == shown["value"]


def test_a_forecast_does_without_the_network_and_names_the_id_without_a_cache(hub: Hub, config: Path, tmp_path: Path):
    with pointed_to(hub, tmp_path / "home"):
        assert gleaner("forecast", config)[0] == 0
    asked = len(hub.requests)
    with pointed_to(None, tmp_path / "home"):
        assert gleaner("forecast", config)[0] == 0
    assert len(hub.requests) == asked
    with pointed_to(None, tmp_path / "elsewhere"):
        code, output = gleaner("forecast", config)
    assert code == 1
    assert output.startswith(f"gleaner: policy.path: value {MODEL!r} is no path here")
    assert output.endswith("HF_HUB_OFFLINE is set; a forecast also does with forecast.parameters_billions\n")
    given = yaml.safe_load(config.read_text())
    given["forecast"]["parameters_billions"] = 0.5
    config.write_text(yaml.safe_dump(given))
    with pointed_to(None, tmp_path / "elsewhere"):
        assert gleaner("forecast", config)[0] == 0


def test_without_the_run_the_newest_commit_is_forecast_and_nothing_is_admitted(
    hub: Hub, config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, "/nowhere")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    whole = yaml.safe_load(config.read_text())
    whole["run"]["url"] = "s3://bucket/run"
    config.write_text(yaml.safe_dump(whole))
    with pointed_to(hub, tmp_path / "home"):
        assert gleaner("forecast", config)[0] == 0
        with pytest.raises(StoreDenied, match=r"s3://bucket/run/run\.json"):
            hub_parameters(load(config), policy_of(load(config)))
    with pointed_to(None, tmp_path / "elsewhere"):
        code, output = gleaner("forecast", config)
    assert (code, len(output.splitlines())) == (1, 1)
    assert "the commit of the run is not known: cannot get s3://bucket/run/run.json" in output


def test_a_damaged_config_in_the_cache_is_found(hub: Hub, config: Path, tmp_path: Path):
    with pointed_to(hub, tmp_path / "home"):
        assert gleaner("forecast", config)[0] == 0
        cached = next((tmp_path / "home").rglob("config.json")).resolve()
        cached.write_bytes(cached.read_bytes() + b" ")
        code, output = gleaner("forecast", config)
    assert code == 1
    assert "policy.path: config.json in the cache is damaged" in output


def test_a_run_of_a_model_on_the_hub_is_admitted_by_the_headers_of_its_weights(hub: Hub, tmp_path: Path, model: Path):
    # Large enough that a request for a header does not get all of it.
    large = {"model.safetensors": save({"a": torch.zeros(300, 1000), "b": torch.zeros(7)})}
    hub.add("models", "Small/Large", {**folder_files(model), **large})
    fleet = tmp_path / "fleet"
    assert gleaner("fleet", "init", fleet, "--runs", tmp_path)[0] == 0
    whole = document(
        str(tmp_path / "run"),
        model,
        policy={"path": "Small/Large"},
        trainer={"placement": "shared", "fleet": str(fleet)},
    )
    file = tmp_path / "run.yaml"
    file.write_text(yaml.safe_dump(whole))
    with pointed_to(hub, tmp_path / "home"):
        code, output = gleaner("fleet", "admit", file, "--phase-s", 60, "--cycle-s", 300)
    assert code == 0, output
    admitted = read_run(connect(str(fleet)), run_id(str(tmp_path / "run")))
    assert admitted.state_bytes == 300_007 * 4 * 3
    assert hub.sent == {"model.safetensors": 100_001}


def test_parameters_are_counted_in_the_files_that_the_index_names(hub: Hub, tmp_path: Path):
    parts = {f"model-0000{n}-of-00002.safetensors": save({f"t{n}": torch.zeros(n, 5)}) for n in (1, 2)}
    index = {"weight_map": {f"t{n}": f"model-0000{n}-of-00002.safetensors" for n in (1, 2)}}
    files = {**parts, "model.safetensors.index.json": json.dumps(index).encode()}
    hub.add("models", "Small/Parts", {**files, "consolidated.safetensors": save({"all": torch.zeros(3, 5)})})
    for name, body in files.items():
        (tmp_path / name).write_bytes(body)
    home = tmp_path / "home"
    with pointed_to(hub, home):
        assert count_parameters("Small/Parts", commit_of("model", "Small/Parts", None, "f"), "f") == 15
    assert count_in_folder(tmp_path) == 15


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"pytorch_model.bin": b"x"}, "holds no .safetensors file; pytorch_model.bin is a pickle"),
        ({"model.safetensors": b"\xff" * 40}, "policy.path: value 'Small/Odd' has damaged weights: Safetensors"),
        ({"model.safetensors.index.json": b"[]", "a.safetensors": b""}, "'Small/Odd' has damaged weights: TypeError"),
        ({"model.safetensors.index.json": b"{", "a.safetensors": b""}, "'Small/Odd' has damaged weights: JSONDecode"),
    ],
)
def test_weights_that_cannot_be_counted_are_one_line(hub: Hub, tmp_path: Path, files: dict[str, bytes], expected: str):
    hub.add("models", "Small/Odd", {"config.json": b"{}", **files})
    with pointed_to(hub, tmp_path / "home"), pytest.raises(HubError) as refused:
        count_parameters("Small/Odd", commit_of("model", "Small/Odd", None, "policy.path"), "policy.path")
    assert expected in str(refused.value)
    assert len(str(refused.value).splitlines()) == 1
