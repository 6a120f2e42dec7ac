"""The benchmark of gradings: a written run whose rewards are right, and a wrong recorded reward is found."""

from dataclasses import replace

import pytest

from benchmarks import regrading
from benchmarks.regrading import work, write_run
from storage.records import layout, records
from storage.records.records import BatchRecord
from storage.stores.connect import connect
from storage.stores.store import CorruptObject

pytestmark = pytest.mark.slow


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(regrading, "ITERATION_RESPONSES", 40)
    write_run(str(tmp_path / "run"), 80)
    return str(tmp_path / "run")


def test_the_written_rewards_are_those_of_the_functions(url):
    measured = work(url)
    assert measured.changed == 0
    assert measured.peak_mib >= measured.before_mib > 0
    assert len(connect(url).list(layout.GRADINGS)) == 3


def test_a_batch_that_says_another_reward_than_the_part_is_found(url):
    store, key = connect(url), layout.batch(1, 0)
    batch = records.read(store, BatchRecord, key)
    first, *rest = batch.responses
    records.put(store, key, replace(batch, responses=(replace(first, reward=17.0), *rest)))
    with pytest.raises(CorruptObject, match="response 0 is not what the batches say"):
        work(url)
