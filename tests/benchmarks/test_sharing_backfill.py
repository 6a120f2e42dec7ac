"""What the benchmark of backfill compares, and that it misses its target if a member delays phases."""

import json
from dataclasses import replace

from benchmarks import sharing_backfill
from benchmarks.sharing_backfill import DIVISIBLE, GPUS, RUNS, STARTS_S, compare, report
from tasks.sharing import shared_cycles

SEEDS = range(2)


def test_a_member_shortens_cycles_less_the_longer_its_engine_starts():
    ratios = [compare(2, (1, 1), start_s, 0.7, SEEDS, 40).ratio for start_s in (5.0, 60.0, 200.0)]
    assert ratios == sorted(ratios)
    assert ratios[0] < 0.95
    assert compare(2, (1, 1), 5.0, 0.7, SEEDS, 40).helping > 0.2


def test_where_nothing_can_be_divided_a_member_shortens_nothing():
    assert compare(2, (1, 1), 5.0, 0.0, SEEDS, 40).ratio >= 1.0


def test_a_member_that_leaves_late_is_found(monkeypatch, capsys):
    """A bug: after its notice it keeps the device for two minutes."""
    late = shared_cycles.Helping
    monkeypatch.setattr(sharing_backfill, "Helping", lambda **given: replace(late(**given), notice_s=120.0))
    worst = compare(3, (1, 2), 5.0, 0.3, SEEDS, 40)
    assert worst.ratio > 1.005
    found = [
        replace(
            worst, runs=count, trainer_gpus=gpus[0], rollout_gpus=gpus[1], start_s=start_s, divisible=part, ratio=0.9
        )
        for count in RUNS
        for gpus in GPUS
        for part in DIVISIBLE
        for start_s in STARTS_S
    ]
    for more, met in (([], True), ([worst], False)):
        report(found + more, as_json=True)
        summary = json.loads(capsys.readouterr().out.splitlines()[-1])
        assert summary["targets"]["longest_cycle_with_a_member_to_without"]["met"] is met
