"""A fleet that a host with real processes serves in a thread of this process, and runs to train on it."""

import json
import tempfile
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import cache

from storage.clock import SystemClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_records import HostRecord
from storage.fleet.spent_records import SpentRecord
from storage.records import records
from storage.stores.connect import connect
from storage.weights import tensor_sets
from tasks.admitting.fleet_admission import Profile, admit
from tasks.learning.collecting import collect_and_wait
from tasks.sharing.host import Host
from tasks.sharing.host_settings import HostSettings
from tasks.sharing.membership import create_fleet, open_fleet
from tasks.sharing.process_workers import ProcessWorkers
from tasks.sharing.serving import ProcessMember
from tests.small_run import EXECUTION, commit_iteration, config, plan_iteration, roll_out, train_small

LIMIT_S = 600
SETTINGS = HostSettings(poll_interval_s=0.02, look_interval_s=0.1, spent_interval_s=0.2)
KEPT = {"retention": {"keep_weights": 9, "keep_checkpoints": 9}}


def in_thread(work, *arguments):
    """Start a thread; returns a function that waits for it and returns its result, or raises its error."""
    outcome = []

    def run():
        try:
            outcome.append((work(*arguments), None))
        except Exception as error:  # noqa: BLE001 - raised again below
            outcome.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()

    def result():
        thread.join(LIMIT_S)
        [(value, error)] = outcome
        if error is not None:
            raise error
        return value

    return result


def make_fleet(tmp_path):
    url = str(tmp_path / "fleet")
    create_fleet(url, [str(tmp_path / "runs")], 5.0, 1.1, SystemClock())
    return url


@contextmanager
def closing_member(member):
    try:
        yield member
    finally:
        member.kill()


@contextmanager
def serving(fleet, name, memory_bytes=1 << 30, devices=1, **settings):
    """A host in a thread, until the end of the block."""
    store, rules = open_fleet(fleet)
    me = HostRecord(
        incarnation=name,
        machine="here",
        memory_bytes=memory_bytes,
        devices=devices,
        usd_per_hour=1.0,
        began_at_s=0.0,
    )
    told = threading.Event()
    how = replace(SETTINGS, **settings)
    with ProcessWorkers() as workers, closing_member(ProcessMember()) as member:
        host = Host(store, rules, me, how, workers, SystemClock(), member=member, is_told_to_end=told.is_set)
        ended = in_thread(host.run)
        try:
            yield workers
        finally:
            told.set()
            ended()


def a_shared_run(tmp_path, fleet, model, name, cycle_s=10.0, ranks=1, **sections):
    url = str(tmp_path / "runs" / name)
    trainer = {"placement": "shared", "fleet": fleet, "group_timeout_s": LIMIT_S, "nproc_per_node": ranks}
    trainer |= sections.pop("trainer", {})
    settings = config(url, model, trainer=trainer, **{**KEPT, **sections})
    admit(settings, model, Profile(phase_s=1.0, cycle_s=cycle_s), SystemClock())
    return settings


def alone(model, iterations, **sections):
    """The states of a run of these settings with a trainer of its own, which is trained once."""
    return _learned_alone(model, iterations, json.dumps(sections))


@cache
def _learned_alone(model, iterations, sections):
    with tempfile.TemporaryDirectory() as url:
        settings = config(url, model, **{**KEPT, **json.loads(sections)})
        for iteration in range(iterations):
            plan_iteration(settings)
            roll_out(url, iteration)
            train_small(url, iteration)
            commit_iteration(url, iteration)
        return states(url)


def states(url):
    store = connect(url)
    prefixes = [key.removesuffix("manifest.json") for key in store.list("") if key.endswith("/manifest.json")]
    return {prefix: tensor_sets.read_manifest(store, prefix).tensors for prefix in prefixes}


def begin(settings, iteration):
    """Roll an iteration out, and begin its train task."""
    plan_iteration(settings, SystemClock())
    roll_out(settings.run.url, iteration)
    return in_thread(collect_and_wait, settings.run.url, iteration, EXECUTION, SystemClock())


def spent_by(fleet, host):
    store = connect(fleet)
    return [records.read(store, SpentRecord, key) for key in store.list(fleet_layout.spent_by(host))]
