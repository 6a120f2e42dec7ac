"""The train task of a run that a host trains, where no host does."""

import pytest
from flytekit.exceptions.user import FlyteRecoverableException

from storage.clock import SystemClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import read_run
from storage.fleet.phase_failure import fail_phase
from storage.fleet.seats import take_seat
from storage.records import records
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.admitting.fleet_admission import Profile, admit
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import PlanReference
from tasks.learning.collecting import PhaseFailed, _sign_of_host
from tasks.sharing.membership import create_fleet
from tasks.train_shared import train_shared
from tests.fleet_records import a_beat, a_host
from tests.small_run import EXECUTION, Unreachable, config, memory_store, plan_iteration, roll_out

pytestmark = pytest.mark.slow

FLEET, URL = "memory://hostless-fleet", "memory://hostless"
PLAN = PlanReference(run_url=URL, iteration=0, weight_version=0, execution=EXECUTION)
PATIENCE_S = 0.4


@pytest.fixture
def fleet(model):
    """The store of a fleet that has admitted the run at URL, whose first iteration is rolled out."""
    made = memory_store("hostless-fleet")
    create_fleet(FLEET, [URL], 60.0, 1.1, SystemClock())
    trainer = {"placement": "shared", "fleet": FLEET, "group_timeout_s": PATIENCE_S}
    memory_store("hostless")
    settings = config(URL, model, trainer=trainer)
    admit(settings, model, Profile(phase_s=1.0, cycle_s=5.0), SystemClock())
    plan_iteration(settings)
    roll_out(URL, 0)
    return made


def test_without_a_living_host_the_task_ends_by_name_and_another_attempt_may_find_one(fleet):
    said = rf"iteration 0 waits for a host: none of the fleet {FLEET} .* has shown a sign of life for 0 s; start one"
    with pytest.raises(FlyteRecoverableException, match=said):
        train_shared(plan=PLAN)
    # A host that has the seat and died is none either.
    run = fleet_layout.run_id(URL)
    records.put(fleet, fleet_layout.host("dead"), a_host("dead"))
    records.put(fleet, fleet_layout.alive("dead"), a_beat("dead", 7))
    assert take_seat(fleet, read_run(fleet, run).id, 0, "dead")
    with pytest.raises(FlyteRecoverableException, match=said):
        train_shared(plan=PLAN)


def test_without_a_standing_trainer_the_task_names_the_node_that_is_missing(model):
    memory_store("hostless")
    trainer = {"placement": "standing", "group_timeout_s": PATIENCE_S}
    plan_iteration(config(URL, model, trainer=trainer))
    roll_out(URL, 0)
    said = r"iteration 0 waits for the standing trainer, which has shown no sign of life for 0 s; .* node 'trainer'"
    with pytest.raises(FlyteRecoverableException, match=said):
        train_shared(plan=PLAN)
    # Its sign of life is read where it stands.
    fleet, run = connect(fleet_layout.standing(URL)), fleet_layout.run_id(URL)
    assert take_seat(fleet, run, 0, "alive")
    records.put(fleet, fleet_layout.alive("alive"), a_beat("alive", 1))
    settings = config_in_force(connect(URL), read_plan(connect(URL), 0))
    assert _sign_of_host(settings) == fleet.get(fleet_layout.alive("alive"))


@pytest.mark.usefixtures("fleet")
def test_a_failure_that_the_host_has_recorded_ends_it_and_no_attempt_is_worth_it():
    fail_phase(connect(URL), 0, "its loss is not finite")
    with pytest.raises(PhaseFailed, match=r"iteration 0 could not be trained: its loss is not finite"):
        train_shared(plan=PLAN)


@pytest.mark.usefixtures("fleet")
def test_a_silent_store_is_worth_another_attempt():
    memory_store("hostless", Unreachable())
    with pytest.raises(FlyteRecoverableException, match="no answer"):
        train_shared(plan=PLAN)
