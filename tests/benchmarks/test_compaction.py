"""The benchmark of conclusion and compaction, and whether it finds a reader that forgets nothing."""

import json
import sys

import pytest

from benchmarks import compaction
from benchmarks.compaction import ARMS, FORGETS_NOTHING, MIB, MILLION, Measured, measure, write_iteration
from storage.journal.compaction import read_batches
from storage.records import layout
from storage.stores.connect import connect

PART_TOKENS = MILLION // 2
# As benchmarks.compaction: token id and log-prob.
TOKEN_BYTES = 8


@pytest.mark.slow
def test_a_reader_that_forgets_nothing_is_found(tmp_path):
    tokens = write_iteration(connect(str(tmp_path)), 4 * MILLION, 2)
    before = set(connect(str(tmp_path)).list(""))
    peak = {arm: measure(str(tmp_path), arm, PART_TOKENS).peak_mib for arm in (ARMS[0], FORGETS_NOTHING)}
    assert peak[FORGETS_NOTHING] - peak[ARMS[0]] > tokens * TOKEN_BYTES / MIB / 2
    assert set(connect(str(tmp_path)).list("")) == before


def test_the_iteration_has_as_many_tokens_as_were_asked_for(tmp_path):
    store = connect(str(tmp_path))
    tokens = write_iteration(store, MILLION // 2, 2)
    graded = [response for batch in read_batches(store, 0) for response in batch.graded]
    assert sum(response.length for response in graded) == tokens
    assert tokens == pytest.approx(MILLION // 2, rel=0.2)
    assert len({key.split("/")[3] for key in store.list(layout.journal(0))}) == 2


@pytest.mark.parametrize(("peaks", "met"), [((100.0, 119.0), True), ((100.0, 121.0), False)])
def test_the_target_is_the_growth_of_the_peak_by_parts(monkeypatch, capsys, peaks, met):
    def made_up(sizes, part_tokens):
        found = {
            (size, arm): Measured(conclude_s=1.0, compact_s=3.0, before_mib=50.0, peak_mib=peak)
            for size, peak in zip(sizes, peaks, strict=True)
            for arm in ARMS
        }
        return [{"arm": "made up"}], found

    monkeypatch.setattr(compaction, "run", made_up)
    monkeypatch.setattr(sys, "argv", ["compaction", "--sizes", "32", "8", "--json"])
    compaction.main()
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    [target] = summary["targets"].values()
    assert target["met"] is met
    # 4 seconds for 32 million tokens.
    assert summary["extrapolated_minutes_for_800_million_tokens"] == pytest.approx(4 * 25 / 60)
