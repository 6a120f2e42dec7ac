"""How a failure is kept in the run: one clear line, without a secret, and never in the way of the failure itself."""

import threading

import pytest

from storage.clock import SystemClock
from storage.records import layout
from storage.records.failures import ERROR_LENGTH_MAX, last_failures
from storage.records.run import ConcludedByAnother, RunBusy
from storage.stores.memory import MemoryStore
from storage.stores.store import StoreDenied, StoreUnavailable
from tasks.reporting.last_failures import TaskSubject, failure_line, forget, keep, keep_silent_end, one_line
from tests.committed_runs import begin, plan_iteration, run_of
from tests.small_run import memory_store

URL = "memory://last-failures"
TRAIN = TaskSubject(task="train", run_url=URL, execution="e", iteration=0)
ERROR = ValueError("bad")


@pytest.fixture
def store():
    found = memory_store("last-failures")
    begin(found)
    return found


def test_what_failed_when_and_where_is_one_line(store):
    before_s = SystemClock().wall()
    keep(
        TaskSubject(task="rollout", run_url=URL, execution="e", iteration=2, slot=7),
        ERROR,
        "ValueError: no\nspace \x1b[2J",
    )
    [found] = last_failures(store, 0)
    assert before_s <= found.at_s <= SystemClock().wall()
    line = failure_line(found)
    assert line.startswith("failed: rollout of iteration 2, slot 7, 20")
    assert line.endswith(f" UTC, on {found.host}: ValueError: no space \\x1b[2J")
    assert line.isprintable()


@pytest.mark.parametrize(
    ("text", "secret"),
    [
        ("cannot reach s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@host/x", "wJalrXUtnFEMI"),
        ("cannot reach s3://AKIAIOSFODNN7EXAMPLE:wJalrXUtnFEMI@host/x", "AKIAIOSFODNN7EXAMPLE"),
        ("401: hf_abcdefghijklmnopqrstuvwxyzABCDEF12", "hf_abcdef"),
        ("GET https://h/x?X-Amz-Signature=0123456789abcdef&a=1", "0123456789abcdef"),
        ("DB_PASS='hunter2-hunter2' is refused", "hunter2"),
        ('{"api_key": "abcdefgh12345678"}', "abcdefgh12345678"),
        ("it said the-value-of-my-token", "the-value-of-my-token"),
    ],
)
def test_no_secret_is_kept(text, secret, monkeypatch, store):
    monkeypatch.setenv("MY_API_TOKEN", "the-value-of-my-token")
    keep(TRAIN, ERROR, f"ValueError: {text}")
    assert "***" in last_failures(store, 0)[0].error
    assert secret.encode() not in store.get(layout.failure("train"))


@pytest.mark.parametrize(
    "text",
    [
        "data.source: value 'x'; allowed: a, b",
        "pad_token: 0 given",
        "s3://bucket/prefix: 403 Forbidden",
        "a=1, b=22222",
    ],
)
def test_what_is_no_secret_stays(text):
    assert one_line(text) == text


def test_an_error_of_any_length_is_kept_in_one_short_line(store):
    keep(TRAIN, ERROR, "x\n" * 10_000)
    [found] = last_failures(store, 0)
    assert len(found.error) == ERROR_LENGTH_MAX
    assert "\n" not in found.error


class Hangs(MemoryStore):
    """A store that does not answer for as long as it is `shut`."""

    def __init__(self):
        super().__init__("last-failures")
        self.shut = threading.Event()

    def get(self, *arguments):
        self.shut.wait(60)
        return super().get(*arguments)

    def delete(self, key):
        self.shut.wait(60)
        super().delete(key)


@pytest.mark.slow
def test_a_store_that_hangs_is_given_up_after_a_bounded_time(caplog):
    store = memory_store("last-failures", Hangs())
    keep(TRAIN, ERROR, "x", limit_s=0.2)
    forget(TRAIN, limit_s=0.2)
    assert not store.shut.is_set()
    assert caplog.text.count("the store has not answered for 0 s") == 2
    store.shut.set()


@pytest.mark.parametrize("error", [StoreUnavailable("no answer"), StoreDenied("put"), RuntimeError("a bug")])
def test_a_store_that_refuses_raises_nothing(error, caplog):
    class Refuses(MemoryStore):
        def put(self, key, body):
            raise error

        def delete(self, key):
            raise error

    store = memory_store("last-failures", MemoryStore("last-failures"))
    begin(store)
    refuses = memory_store("last-failures", Refuses("last-failures"))
    refuses.create(layout.RUN, store.get(layout.RUN))
    keep(TRAIN, ERROR, "x")
    forget(TRAIN)
    assert caplog.text.count(str(error)) == 2


def test_where_there_is_no_run_nothing_is_written():
    store = memory_store("last-failures")
    keep(TRAIN, ERROR, "x")
    assert store.list("") == []


@pytest.mark.parametrize("error", [RunBusy("held"), ConcludedByAnother(0, "trained")])
def test_that_another_execution_does_the_work_is_no_failure(error, store):
    keep(TRAIN, error, "x")
    assert last_failures(store, 0) == []


def test_a_plan_that_failed_is_of_the_first_iteration_without_one(store):
    keep(TaskSubject(task="plan", run_url=URL), ERROR, "x")
    assert [found.iteration for found in last_failures(store, 0)] == [0]
    whole = memory_store("last-failures")
    run_of(whole, 2)
    plan_iteration(whole, 2)
    keep(TaskSubject(task="plan", run_url=URL), ERROR, "x")
    assert [found.iteration for found in last_failures(whole, 2)] == [3]
    keep(TaskSubject(task="evaluation", run_url=URL), ERROR, "x")
    assert {found.task: found.iteration for found in last_failures(whole, 2)} == {"plan": 3, "evaluation": 2}


def test_that_an_attempt_was_killed_is_told_by_the_next_one_unless_it_left_a_word(store):
    work = TaskSubject(task="evaluation", run_url=URL, execution="e", iteration=4)
    keep_silent_end(work, 0)
    assert last_failures(store, 0) == []
    keep(TaskSubject(task="evaluation", run_url=URL, execution="earlier", iteration=4), ERROR, "of another execution")
    keep_silent_end(work, 1)
    [killed] = last_failures(store, 0)
    assert killed.error.startswith("attempt 1 was killed: its memory ran out, or ")
    keep(work, ERROR, "its own word")
    keep_silent_end(work, 2)
    assert [each.error for each in last_failures(store, 0)] == ["its own word"]
