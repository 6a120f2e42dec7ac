"""Records of a fleet that another team damaged or forged: every command still answers, and names them.

A new case is a line in DAMAGE, FORGED or ELSEWHERE.
"""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gleaner import main
from storage.clock import ManualClock
from storage.fleet import fleet_layout
from storage.fleet.fleet_reading import FleetReader, waiting_runs
from storage.fleet.fleet_records import SeatRecord, WaitingRun
from storage.fleet.spent_records import SpentEntry, SpentRecord
from storage.records import layout, records
from storage.stores.connect import connect, is_below
from storage.stores.memory import MemoryStore
from tasks.configuration.run_config import parse
from tasks.preparing.iteration import prepare
from tasks.sharing.billing import bill, total_s, without_gaps
from tasks.sharing.fleet_rooms import look_at_rooms
from tasks.sharing.seating import Seating
from tests.fleet_records import FLEET, BeatingClock, a_beat, a_host, a_run
from tests.small_run import EXECUTION, document

HOST, OTHER_HOST, WAITER = "a" * 32, "b" * 32, "c" * 32
A, B = a_run("a"), a_run("b")
ESCAPES = "x\x1b]0;owned\x07\x1b[2J\x9b31m\u202e\nforged"
HUGE = 10**400


def spent(host, sequence, run, began_s, ended_s):
    entry = SpentEntry(kind="train", run=run, iteration=sequence, began_s=began_s, ended_s=ended_s)
    return SpentRecord(host=host, sequence=sequence, entries=(entry,), seated=tuple(sorted((A.id, B.id))))


def fleet_objects():
    """The objects of a fleet of two runs and two hosts, by key."""
    found = [
        A,
        B,
        SeatRecord(run=A.id, epoch=1, host=HOST),
        SeatRecord(run=B.id, epoch=1, host=OTHER_HOST),
        *(a_host(each, memory_bytes=1 << 40) for each in (HOST, OTHER_HOST)),
        *(a_beat(each, 1) for each in (HOST, OTHER_HOST)),
        *(spent(HOST, n, A.id, 10.0 * n, 10.0 * (n + 1)) for n in range(3)),
        *(spent(OTHER_HOST, n, B.id, 10.0 * n, 10.0 * (n + 1)) for n in range(2)),
        WaitingRun(incarnation=WAITER, sequence=0, run_url="memory://runs/w", waited_s=1.0, state="waiting"),
    ]
    left = records.encode(fleet_layout.left("0" * 16), FLEET)
    return {each.key: records.encode(each.key, each) for each in found} | {fleet_layout.left("0" * 16): left}


OBJECTS = fleet_objects()
DAMAGED_KEYS = sorted(OBJECTS)


def other_type(body):
    """The same record with a list for the first text and a text for the first number, under a right digest."""
    return with_fields(body, lambda value: [] if isinstance(value, str) else "1" if isinstance(value, float) else value)


def with_fields(body, change):
    document = json.loads(body)
    changed = {name: change(value) for name, value in document["body"].items()}
    from storage.records.canonical import wrap  # noqa: PLC0415

    return wrap(document["key"], document["kind"], json.dumps(changed, sort_keys=True, separators=(",", ":")).encode())


def at_numbers(value):
    return lambda body: with_fields(
        body, lambda found: value if isinstance(found, int | float) and not isinstance(found, bool) else found
    )


def at_names(value):
    return lambda body: with_fields(body, lambda found: value if isinstance(found, str) else found)


DAMAGE = {
    "empty": lambda _: b"",
    "one byte": lambda body: body[:1],
    "cut": lambda body: body[:-10],
    "a list": lambda _: b"[]",
    "null": lambda _: b"null",
    "deep": lambda _: b"[" * 100_000,
    "bytes": lambda _: b"\xff\x00\x1b[2J" * 10,
    "wrong digest": lambda body: body.replace(b'"body":{"', b'"body":{"x', 1),
    "another kind": lambda body: body.replace(b'"kind":"', b'"kind":"x'),
    "another format": lambda body: body.replace(b'"format":1', b'"format":2'),
    "other types": other_type,
    "one more field": lambda body: with_fields(body, lambda v: v).replace(b'{"body":{', b'{"body":{"zz":1,', 1),
    "huge integers": at_numbers(HUGE),
    "infinite": at_numbers(1e308),
    "negative": at_numbers(-1),
    "paths for names": at_names("../../etc/passwd"),
    "an absolute path": at_names("/etc/passwd"),
    "no names": at_names(""),
    "long names": at_names("n" * 100_000),
    "escapes": at_names(ESCAPES),
    "another's name": at_names("d" * 32),
    "too long": lambda body: body + b" " * (5 << 20),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A fleet on the disk, as commands read it."""
    root = tmp_path_factory.mktemp("fleets") / "fleet"
    store = connect(str(root))
    records.put(store, fleet_layout.FLEET, FLEET)
    for key, body in OBJECTS.items():
        store.put(key, body)
    return root


@pytest.fixture
def store():
    made = MemoryStore()
    for key, body in OBJECTS.items():
        made.put(key, body)
    records.put(made, fleet_layout.FLEET, FLEET)
    return made


def gleaner(*arguments):
    done = CliRunner().invoke(main, list(map(str, arguments)), catch_exceptions=False)
    return done.exit_code, done.output


def numbers_of(value):
    """All leaves of a JSON value."""
    if isinstance(value, dict | list):
        return [leaf for each in (value.values() if isinstance(value, dict) else value) for leaf in numbers_of(each)]
    return [value]


def is_clean(text):
    return not {chr(code) for code in (*range(9), *range(11, 32), *range(127, 160), 0x202E)} & set(text)


# After these a record is refused, whichever it is.
REFUSED = {"empty", "cut", "null", "wrong digest", "another format", "other types", "huge integers", "too long"}


@pytest.mark.slow
@pytest.mark.parametrize("name", DAMAGE)
def test_status_and_report_show_all_but_the_damaged_record_and_name_it(folder, name):
    store = connect(str(folder))
    for key in DAMAGED_KEYS:
        whole, owner = OBJECTS[key], key.split("/")[1]
        store.put(key, DAMAGE[name](whole))
        try:
            status, report = gleaner("fleet", "status", folder), gleaner("fleet", "report", folder)
            code, output = gleaner("fleet", "report", folder, "--json")
        finally:
            store.put(key, whole)
        assert (code, status[0], report[0]) == (0, 0, 0), key
        assert is_clean(status[1] + report[1] + output), key
        found = json.loads(output, parse_constant=str)
        assert not {"NaN", "Infinity"} & set(map(str, numbers_of(found)))
        for run in {A.id, B.id} - {owner}:
            assert run in status[1], key
            assert run in {each["id"] for each in found["runs"]}, key
        for host in {HOST, OTHER_HOST} - {owner.removesuffix(".json")}:
            assert host[:12] in status[1], key
            assert host in {each["incarnation"] for each in found["hosts"]}, key
        if name in REFUSED and not key.endswith("left.json"):
            said = f"left out: object '{key}' is corrupt: "
            assert said in status[1], key
            # Seats and waiting runs are not in a report.
            assert (said in report[1]) == ("seats/" not in key and "waiting/" not in key), key


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_no_damaged_record_keeps_a_host_from_seating_the_other_runs(store, damage):
    for key in DAMAGED_KEYS:
        whole = OBJECTS[key]
        store.put(key, damage(whole))
        clock = ManualClock()
        mine = a_host("me", memory_bytes=1 << 40)
        records.put(store, mine.key, mine)
        seating = Seating(store, FLEET, mine, clock)
        seating.look()
        clock.advance(2 * FLEET.host_ttl_s)
        seating.look()
        seated = {A.id, B.id} & seating.seated.keys()
        owner = key.split("/")[1] if key.startswith(fleet_layout.RUNS) else None
        assert seated >= {A.id, B.id} - {owner}, key
        for made in set(store.list("")) - OBJECTS.keys() - {fleet_layout.FLEET}:
            store.delete(made)
        store.put(key, whole)


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_no_damaged_record_keeps_a_run_from_being_admitted(store, damage):
    for key in DAMAGED_KEYS:
        whole = OBJECTS[key]
        store.put(key, damage(whole))
        rooms = look_at_rooms(store, FLEET, BeatingClock(store, {HOST: "idle", OTHER_HOST: "idle"}), without="0" * 16)
        store.put(key, whole)
        assert len(rooms.rooms) >= 2 - (key.startswith(fleet_layout.HOSTS)), key


FORGED = {
    "a path for a host": SeatRecord(run=A.id, epoch=2, host="../../run"),
    "an absolute path for a host": SeatRecord(run=A.id, epoch=2, host="/etc/passwd"),
    "a folder for a host": SeatRecord(run=A.id, epoch=2, host="a/b"),
    "dots for a host": SeatRecord(run=A.id, epoch=2, host=".."),
    "nothing for a host": SeatRecord(run=A.id, epoch=2, host=""),
}


@pytest.mark.parametrize("seat", FORGED.values(), ids=FORGED)
def test_a_forged_seat_costs_its_own_run_alone(store, seat):
    records.put(store, fleet_layout.seat(A.id, 2), seat)
    clock = ManualClock()
    seating = Seating(store, FLEET, a_host("me", memory_bytes=1 << 40), clock)
    records.put(store, fleet_layout.host("me"), a_host("me", memory_bytes=1 << 40))
    seating.look()
    clock.advance(2 * FLEET.host_ttl_s)
    seating.look()
    assert seating.seated.keys() == {B.id}


def test_keys_that_no_fleet_has_are_passed_over(folder):
    store = connect(str(folder))
    keys = ["runs/note.txt", "runs/x/run.json", "hosts/x/y.json", "hosts/z", "waiting/x", "alive/x", "spent/x"]
    for key in keys:
        store.put(key, b"x")
    try:
        for command in ("status", "report"):
            code, output = gleaner("fleet", command, folder)
            assert code == 0
            assert "a-machine" in output
    finally:
        for key in keys:
            store.delete(key)


@given(
    bodies=st.dictionaries(
        st.sampled_from(DAMAGED_KEYS), st.one_of(st.binary(max_size=300), st.sampled_from([*OBJECTS.values()]))
    )
)
def test_whatever_lies_under_its_keys_a_fleet_is_shown(bodies):
    store = MemoryStore()
    for key, body in (OBJECTS | bodies).items():
        store.put(key, body)
    reader = FleetReader(store, FLEET)
    hosts = reader.hosts()
    for host in hosts:
        whole, _ = without_gaps(reader.spent(host.incarnation))
        assert total_s(bill(whole, 0.0, {})) >= 0
    assert len(reader.runs()) + len(hosts) + len(reader.damaged) >= 4


@given(times=st.lists(st.tuples(st.floats(0, 1e6), st.floats(0, 1e6)), max_size=6), missing=st.sets(st.integers(0, 5)))
def test_what_is_left_of_a_hosts_records_can_be_billed(times, missing):
    kept = [spent(HOST, n, A.id, *each) for n, each in enumerate(times) if n not in missing]
    whole, unfit = without_gaps(kept)
    last_s = max((entry.ended_s for record in whole for entry in record.entries), default=0.0)
    assert total_s(bill(whole, 0.0, {})) == pytest.approx(last_s)
    assert len(unfit) + len([each for each in whole if each.entries[0].kind == "train"]) == len(kept)


ELSEWHERE = [
    *("/data/runs/../theirs", "/data/runs/%2e%2e/theirs", "/data/runs/%2E%2e/theirs", "/data/runs/%252e%252e/x"),
    *("/data/runs/./x", "/data/runs/.%2e/x", "/data/runs/a%2fb", "/data/runs/a%5cb", "/data/runs-of-others/x"),
    *("file:///data/runs/%2e%2e/theirs", "file:///data/runs/../x", "FILE:///data/theirs/x", "s3://data/runs/x"),
    *("", "~nobody-here/x", "/data/runs/\0", "/data/runs/" + "x" * 300, "/data/runs/\x1b[2J", " /data/runs/x"),
    *("gs://data/runs/x", "data/runs/x", "memory://data/runs/x", "http://data/runs/x", "/data/theirs"),
]


@pytest.mark.parametrize("url", ELSEWHERE)
def test_a_run_elsewhere_is_not_below_the_prefix_however_it_is_written(url):
    assert not is_below(url, "/data/runs")


@pytest.mark.parametrize(
    "url", ["/data/runs", "/data/runs/", "/data//runs/x", "file:///data/runs/x%20y", "/data/runs/..x"]
)
@pytest.mark.parametrize("prefix", ["/data/runs", "/data/runs/", "file:///data/runs"])
def test_a_run_below_the_prefix_is_however_both_are_written(url, prefix):
    assert is_below(url, prefix)


@pytest.mark.parametrize(
    "url", ["s3://b/runs/%2e%2e/x", "s3://b/runs/../x", "s3://b/runs-x", "s3://c/runs/x", "S3://b"]
)
def test_a_bucket_is_compared_by_its_parts_too(url):
    assert not is_below(url, "s3://b/runs")
    assert is_below("S3://b/runs/x", "s3://b/runs/")


def test_a_link_out_of_the_prefix_leads_to_no_run(tmp_path):
    runs, theirs = tmp_path / "runs", tmp_path / "theirs"
    theirs.mkdir()
    runs.mkdir()
    (runs / "link").symlink_to(theirs)
    (runs / "circle").symlink_to(runs / "circle")
    assert not is_below(str(runs / "link" / "x"), str(runs))
    assert not is_below(str(runs / "circle" / "x"), str(runs))
    assert is_below(str(runs / "own"), str(runs))


@pytest.mark.parametrize(
    ("prefix", "said"),
    [
        ("s3://b/runs/%2e%2e", "--runs: prefix "),
        ("/data/%2e%2e/runs", "--runs: value '/data/%2e%2e/runs'; allowed: no part '.' or '..'"),
        ("/data/../runs", "--runs: value '/data/../runs'; allowed: no part '.' or '..'"),
        ("memory:", "--runs: value 'memory:'; allowed: a path, "),
        ("http://b/runs", "--runs: value 'http://b/runs'; allowed: a path, "),
    ],
)
def test_a_prefix_below_which_no_run_can_lie_is_refused(tmp_path, prefix, said):
    code, output = gleaner("fleet", "init", tmp_path / "fleet", "--runs", prefix)
    assert (code, output.count("\n")) == (1, 1)
    assert said in output
    assert not (tmp_path / "fleet").exists()


def test_a_fleet_has_a_place_of_its_own(tmp_path, model):
    run = tmp_path / "run"
    prepare(parse(document(str(run), model)), EXECUTION, ManualClock())
    prefix = tmp_path / "others"
    for place, said in (
        (run, "not that of a run"),
        (run / "fleet", f"not in the run at {run}"),
        (run / "deep" / "fleet", f"not in the run at {run}"),
        (tmp_path, "not above the run in run"),
    ):
        code, output = gleaner("fleet", "init", place, "--runs", "s3://bucket/runs")
        assert (code, output.count("\n")) == (1, 1), output
        assert output.startswith(f"gleaner: FLEET_URL: value '{place}'; allowed: a place of its own, {said}")
    assert not list(tmp_path.rglob("fleet.json"))
    fleet = tmp_path / "fleets" / "one"
    assert gleaner("fleet", "init", fleet, "--runs", fleet / "runs")[1].startswith("gleaner: --runs: value ")
    assert gleaner("fleet", "init", fleet, "--runs", prefix)[0] == 0
    for place in (fleet / "runs" / "mine", fleet, fleet.parent):
        with pytest.raises(ValueError, match=r"run\.url: value .*; allowed: a place of its own, not ") as refused:
            prepare(parse(document(str(place), model)), EXECUTION, ManualClock())
        assert "fleet" in str(refused.value)
    assert not (fleet / layout.RUN).exists()


class WaitersBeat(ManualClock):
    """Processes wait for these urls, and beat while another sleeps."""

    def __init__(self, store, urls):
        super().__init__()
        self.store, self.urls, self.beats = store, urls, 0
        self.sleep(0.0)

    def sleep(self, duration_s):
        super().sleep(duration_s)
        self.beats += 1
        for number, url in enumerate(self.urls):
            beat = WaitingRun(incarnation=f"w{number}", sequence=self.beats, run_url=url, waited_s=9e9, state="waiting")
            records.put(self.store, beat.key, beat)


def test_a_heartbeat_for_a_run_that_the_fleet_does_not_allow_is_in_no_runs_way(store):
    clock = WaitersBeat(store, ["memory://runs/x", "memory://theirs/x", "memory://runs/../x", ESCAPES])
    assert [each.run_url for each in waiting_runs(store, FLEET, clock)] == ["memory://runs/x"]


def test_another_record_under_a_key_is_not_believed(store):
    """Well formed, with a right digest, and about another host."""
    key = fleet_layout.host(HOST)
    store.put(key, records.encode(key, a_host(OTHER_HOST)))
    key = fleet_layout.admitted(A.id)
    store.put(key, records.encode(key, replace(A, run_url="memory://runs/x")))
    key = fleet_layout.admitted(B.id)
    store.put(key, records.encode(key, replace(B, run_url="memory://theirs/b")))
    reader = FleetReader(store, FLEET)
    assert [each.incarnation for each in reader.hosts()] == [OTHER_HOST]
    assert reader.runs() == []
    reader.damaged.remove(f"no object '{fleet_layout.admitted('0' * 16)}'")
    assert [line.partition(" is corrupt: ")[0] for line in reader.damaged] == [
        f"object '{each}'" for each in (fleet_layout.host(HOST), *sorted(map(fleet_layout.admitted, (A.id, B.id))))
    ]
