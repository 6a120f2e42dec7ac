import json
from functools import partial
from pathlib import Path

import pytest

from resources.prices import (
    GET_USD,
    PRICES,
    PRICES_VARIABLE,
    PricesError,
    RequestPrices,
    UnknownMachine,
    dollars,
    machine_price,
    price_table,
    request_prices,
)

S3 = "s3://bucket/run"
OWN = {"on_demand_usd_per_h": 0.8, "spot_usd_per_h": 0.3, "gpus": 1}


@pytest.fixture(autouse=True)
def _no_prices_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRICES_VARIABLE, raising=False)


def test_listed_prices_are_sane_and_name_their_source():
    assert len({price.machine for price in PRICES}) == len(PRICES)
    for price in PRICES:
        assert 0 < price.spot_usd_per_h < price.on_demand_usd_per_h
        assert price.gpus >= 1
        assert price.source
        assert price.as_of


def test_price_depends_on_interruptible():
    assert machine_price("p5.48xlarge").usd_per_h(interruptible=False) == 55.04
    assert machine_price("p5.48xlarge").usd_per_h(interruptible=True) == 14.5543
    assert machine_price("p5.48xlarge").usd_per_gpu_h(interruptible=False) == 6.88


def test_dollars():
    assert dollars(1800.0, 55.04) == pytest.approx(27.52)
    assert dollars(0.0, 55.04) == 0.0


def test_unknown_machine_lists_the_known_ones():
    with pytest.raises(
        UnknownMachine, match=r"no price for 'p6'.*known: .*p4d\.24xlarge.*p5\.48xlarge.*GLEANER_PRICES"
    ):
        machine_price("p6")


@pytest.mark.parametrize("name", ["own.json", "own.yaml", "own.yml"])
def test_file_overrides_and_adds(tmp_path: Path, name: str):
    path = tmp_path / name
    path.write_text(json.dumps({"p5.48xlarge": OWN | {"gpus": 8}, "workstation": OWN}))  # JSON is YAML, too
    assert machine_price("p5.48xlarge", path).usd_per_h(interruptible=True) == 0.3
    assert machine_price("workstation", str(path)).usd_per_h(interruptible=False) == 0.8
    assert machine_price("p4d.24xlarge", path).usd_per_h(interruptible=False) == 21.95764
    assert machine_price("workstation", path).source == str(path)


def test_environment_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "own.json").write_text(json.dumps({"workstation": OWN}))
    monkeypatch.setenv(PRICES_VARIABLE, str(tmp_path / "own.json"))
    assert machine_price("workstation").usd_per_h(interruptible=True) == 0.3
    monkeypatch.setenv(PRICES_VARIABLE, "")
    assert "workstation" not in price_table()


@pytest.mark.parametrize(
    ("entry", "field"),
    [
        (OWN | {"spot_usd_per_h": -1.0}, "box.spot_usd_per_h: value -1.0; .*greater than or equal to 0"),
        (OWN | {"spot_usd_per_h": "cheap"}, "box.spot_usd_per_h: value 'cheap'"),
        (OWN | {"spot_usd_per_h": float("nan")}, "box.spot_usd_per_h: value 'NaN'; .*number"),
        (OWN | {"price": 1.0}, "box.price: .*[Uu]nexpected"),
        (OWN | {"gpus": 1.5}, "box.gpus: value 1.5"),
        ({"gpus": 1}, "box.on_demand_usd_per_h: .*required"),
        (3.0, "box: value 3.0"),
    ],
)
def test_bad_entry_names_file_and_field(tmp_path: Path, entry: object, field: str):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"box": entry}))
    with pytest.raises(PricesError, match=rf"own\.json: {field}"):
        price_table(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("own.json", "{", "not YAML or JSON: line 1"),
        ("own.yaml", "a: [", "not YAML or JSON: line 1"),
        ("own.toml", "", r"file type '\.toml'; allowed: \.json"),
        ("own.yaml", "- 1", "the document: value"),
        ("own.yaml", "", "the document: value None"),
    ],
)
def test_bad_file_is_named(tmp_path: Path, name: str, text: str, message: str):
    (tmp_path / name).write_text(text)
    with pytest.raises(PricesError, match=message):
        price_table(tmp_path / name)


def test_unquoted_date_of_yaml_is_text(tmp_path: Path):
    (tmp_path / "own.yaml").write_text("box: {on_demand_usd_per_h: 2, spot_usd_per_h: 0, gpus: 0, as_of: 2026-11-01}\n")
    price = machine_price("box", tmp_path / "own.yaml")
    assert price.as_of == "2026-11-01"
    assert price.usd_per_gpu_h(interruptible=False) == 2.0


def test_missing_file_is_named(tmp_path: Path):
    with pytest.raises(PricesError, match=r"none\.yaml: cannot be read"):
        price_table(tmp_path / "none.yaml")


def test_requests_cost_what_s3_lists_unless_the_file_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert request_prices(S3).usd(puts=1000, gets=10_000) == pytest.approx(0.005 + 0.004)
    path = tmp_path / "own.yaml"
    path.write_text("requests: {put_usd: 1.0e-05}\nbox: {on_demand_usd_per_h: 2, spot_usd_per_h: 1, gpus: 1}\n")
    assert request_prices(S3, path) == RequestPrices(put_usd=1e-5, get_usd=GET_USD)
    assert "requests" not in price_table(path)
    assert machine_price("box", path).usd_per_h(interruptible=True) == 1.0
    monkeypatch.setenv(PRICES_VARIABLE, str(path))
    assert request_prices(S3).put_usd == 1e-5


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"put_usd": -1.0}, r"requests\.put_usd: value -1\.0"),
        ({"put_usd": "1"}, r"requests\.put_usd: value '1'"),
        ({"get": 1.0}, r"requests\.get: .*[Uu]nexpected"),
        (OWN, r"requests\.\w+: .*[Uu]nexpected"),
        (None, r"requests: value None"),
    ],
)
def test_bad_request_prices_are_named_by_whoever_reads_the_file(tmp_path: Path, entry: object, message: str):
    path = tmp_path / "own.json"
    path.write_text(json.dumps({"requests": entry}))
    for read in (price_table, partial(request_prices, S3), partial(request_prices, "runs/mine")):
        with pytest.raises(PricesError, match=rf"own\.json: {message}"):
            read(path)


@pytest.mark.parametrize("url", ["runs/mine", "/runs/mine", "file:///runs/mine", "memory://mine"])
def test_requests_to_a_store_without_a_provider_cost_nothing(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    assert request_prices(url).usd(puts=10**9, gets=10**9) == 0
    (tmp_path / "own.yaml").write_text("requests: {put_usd: 1.0, get_usd: 1.0}\n")
    monkeypatch.setenv(PRICES_VARIABLE, str(tmp_path / "own.yaml"))
    assert request_prices(url).usd(puts=1, gets=1) == 0
    assert request_prices(S3).usd(puts=1, gets=1) == 2
