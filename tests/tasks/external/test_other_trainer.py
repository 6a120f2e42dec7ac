"""A run whose trainer changes: to a program at any iteration, and back never, because its state is not in the run."""

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.records import SettingsRecord
from storage.records.run import acquire_lease, next_iteration, release_lease
from storage.stores.connect import connect
from tasks.configuration.iteration_config import TrainedOutside, settings_of
from tasks.external.rollouts import Rollouts
from tasks.preparing.iteration import prepare
from tests.external_program import advance, one_step, settings
from tests.small_run import EXECUTION, commit_iteration, everything, memory_store, plan_iteration, roll_out, train_small

URL = "memory://other-trainer"
REFUSED = (
    r"^trainer\.placement: another program has trained iteration {}, whose state the run lacks; allowed: 'external'"
)
OWN = {"trainer": {"placement": "own", "group_timeout_s": 5.0}}


def own(model, **trainer):
    return settings(URL, model, trainer=OWN["trainer"] | trainer)


def by_our_trainer(model, iteration):
    plan_iteration(own(model))
    roll_out(URL, iteration)
    train_small(URL, iteration)
    commit_iteration(URL, iteration)
    release_lease(connect(URL), EXECUTION)


@pytest.mark.parametrize("placement", ["own", "pod", "standing"])
def test_no_trainer_of_ours_goes_on_after_a_program(model, placement):
    store = memory_store("other-trainer")
    by_our_trainer(model, 0)
    advance(settings(URL, model), 2)
    before = everything(store)
    with pytest.raises(TrainedOutside, match=REFUSED.format(1)):
        prepare(own(model, placement=placement), "e1", ManualClock())
    new = everything(store).keys() - before.keys()
    assert not [key for key in new if not key.startswith((layout.LEASE, "standing/"))]
    acquire_lease(store, "whoever is next", 1e9, ManualClock())


def test_a_program_goes_on_where_our_trainer_stood(model):
    memory_store("other-trainer")
    by_our_trainer(model, 0)
    advance(settings(URL, model), 3)
    assert next_iteration(connect(URL)) == 3


def test_who_published_decides_and_not_who_planned(model):
    """Planned for our trainer, published by a program, and planned again for ours: no replay makes a checkpoint."""
    store = memory_store("other-trainer")
    plan_iteration(own(model))
    release_lease(store, EXECUTION)
    with Rollouts(settings(URL, model)) as rollouts:
        rollouts._plans.conclude = lambda _: None  # the program dies before
        one_step(rollouts, 0)
    with pytest.raises(TrainedOutside, match=REFUSED.format(0)):
        prepare(own(model), "e1", ManualClock())
    # The train task alone, of an execution that had planned earlier.
    records.put(store, layout.settings(0), SettingsRecord(config=settings_of(own(model)), execution=EXECUTION))
    with pytest.raises(TrainedOutside, match=REFUSED.format(0)):
        train_small(URL, 0)
    assert not store.list(layout.CHECKPOINTS)
