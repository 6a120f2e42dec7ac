"""The benchmark of wide crews on narrow ones, and whether it finds a reader that asks too often."""

import json
import sys

import pytest

from benchmarks import width
from benchmarks.width import Followed, follow, growth, targets_of

WIDTH = 120


@pytest.fixture(scope="module")
def followed() -> Followed:
    return follow(WIDTH)


def test_a_shard_is_asked_for_about_once_and_found_within_a_flush_interval(followed):
    shards_per_s = WIDTH / 5.0
    assert shards_per_s <= followed.requests_per_s <= 2 * shards_per_s
    assert 0 < followed.lag_median <= followed.lag_p99 <= 1.5
    assert followed.cores > 0


def test_a_reader_that_asks_everybody_at_every_look_is_found(followed, monkeypatch):
    monkeypatch.setattr("tasks.learning.arrivals.ASKED_AT_EVERY_LOOK", WIDTH)
    assert follow(WIDTH).requests_per_s > 2 * followed.requests_per_s


def made_up(members, requests_per_s, cores) -> Followed:
    return Followed(
        width=members,
        requests_per_s=requests_per_s,
        cores=cores,
        lag_median=0.5,
        lag_p99=1.0,
        bytes_per_token=20.0,
        groups=1,
    )


def test_growth_is_the_exponent_from_the_second_width_on():
    found = [made_up(64, 60.0, 0.9), made_up(250, 60.0, 0.1), made_up(1000, 480.0, 0.4), made_up(4000, 960.0, 6.4)]
    assert growth(found, "requests_per_s") == pytest.approx(1.0)
    assert growth(found, "cores") == pytest.approx(1.5)
    targets = {target.name: target for target in targets_of(found)}
    assert targets["growth_of_requests_per_s"].met
    assert not targets["growth_of_cores"].met
    assert not targets["requests_per_s_at_1000"].met
    assert targets["cores_at_1000"].met


def test_the_command_prints_a_table_and_json(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["width", "--widths", "8", "--json"])
    width.main()
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert summary["rows"][0]["members"] == 8
