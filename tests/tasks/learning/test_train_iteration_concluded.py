"""A trainer that was frozen while another concluded its iteration."""

import pytest

from storage.records import layout
from storage.records.run import ConcludedByAnother
from storage.stores.memory import MemoryStore
from tests.small_run import config, everything, memory_store, model_directory, plan_iteration, roll_out, train_small

URL = "memory://advance"


class ConcludedMeanwhile(MemoryStore):
    """The iteration is concluded and its journal deleted between a trainer's start and its first micro-batch."""

    def __init__(self, objects):
        super().__init__("advance")
        later = ("training.json", "report.json", "checkpoints/00000001/", "weights/00000001/")
        self._objects.update({key: body for key, body in objects.items() if not any(part in key for part in later)})
        self.is_concluded = False

    def get(self, key, start=0, end=None):
        if key == layout.batch(0, 0) and not self.is_concluded:
            self.is_concluded = True
            self.put(layout.report(0), b"a report")
            for shard in self.list(layout.journal(0)):
                self.delete(shard)
        return super().get(key, start, end)


@pytest.mark.slow
def test_a_trainer_that_wakes_after_the_conclusion_says_so(tmp_path):
    before = memory_store("advance")
    plan_iteration(config(URL, model_directory(tmp_path)))
    roll_out(URL, 0)
    train_small(URL, 0)
    store = memory_store("advance", ConcludedMeanwhile(everything(before)))
    with pytest.raises(ConcludedByAnother, match="iteration 0 was concluded by another execution or attempt"):
        train_small(URL, 0)
    assert store.is_concluded
    assert layout.training(0) not in store.list("")
