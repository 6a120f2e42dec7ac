"""Refusals that pass by themselves, of real disks and servers: no room, expired credentials, a clock that is off."""

import errno
import os
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from storage.stores.local import LocalStore
from storage.stores.refusals import DeniedForNow, Refusals
from storage.stores.s3 import S3Store
from storage.stores.store import ObjectMissing, StoreDenied, StoreUnfit, commit
from tests.s3_server import KEY, S3_BUCKET, Gate, make_bucket, moto_server, point_to, write_keys
from tests.storage.stores.test_s3 import VERBS

OLD, NEW = "AKIAOLD", "AKIANEW"


@pytest.fixture(scope="module")
def server() -> Iterator[tuple[str, Gate]]:
    with moto_server(Gate) as (endpoint, gate):
        with pytest.MonkeyPatch.context() as environment:
            point_to(endpoint, environment)
            make_bucket(endpoint)
        assert isinstance(gate, Gate)
        yield endpoint, gate


@pytest.fixture
def gate(server: tuple[str, Gate], monkeypatch: pytest.MonkeyPatch) -> Gate:
    endpoint, found = server
    point_to(endpoint, monkeypatch)
    found.code, found.refusals, found.refused, found.asked = "ExpiredToken", 0, frozenset(), 0
    return found


@contextmanager
def a_store(refused_s_max: float = 60.0) -> Iterator[S3Store]:
    with closing(S3Store(S3_BUCKET, uuid.uuid4().hex, refused_s_max=refused_s_max)) as store:
        yield store


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidToken", "RequestTimeTooSkewed", "QuotaExceeded"])
def test_what_passes_by_itself_ends_no_call_of_a_store_that_has_answered(gate, code):
    with a_store() as store:
        assert store.list("") == []
        gate.code = code
        for verb in VERBS:
            gate.refusals = 2
            with suppress(ObjectMissing):
                verb(store)
            assert gate.refusals == 0
        gate.refusals = 2
        assert commit(store, "mine", b"nonce") is True
        assert store.get("mine") == b"nonce"


@pytest.mark.slow
def test_keys_that_were_exchanged_in_the_file_of_credentials_are_read_anew(gate, monkeypatch, tmp_path):
    file = tmp_path / "credentials"
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(file))
    write_keys(file, OLD)
    with a_store() as store:
        store.put("a", b"1")
        gate.refused, gate.asked = frozenset({OLD}), 0
        write_keys(file, NEW)
        store.put("a", b"2")
        assert gate.asked == 2, "one refusal, and one call with what was read anew"
        # A file that is rewritten in place is empty for a moment.
        gate.refused = frozenset({NEW})
        file.write_text("")
        renewed = threading.Timer(1.0, write_keys, (file, OLD))
        renewed.start()
        assert store.get("a") == b"2"
        renewed.join()


@pytest.mark.slow
def test_keys_of_the_environment_are_read_anew(gate, monkeypatch):
    with a_store() as store:
        store.put("a", b"1")
        gate.refused = frozenset({KEY})
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", NEW)
        assert store.get("a") == b"1"


@pytest.mark.slow
def test_many_threads_that_are_refused_together_all_go_on(gate, monkeypatch):
    with a_store() as store:
        store.put("a", b"1")
        gate.refused = frozenset({KEY})
        found: list[bytes] = []
        threads = [threading.Thread(target=lambda: found.append(store.get("a"))) for _ in range(8)]
        for thread in threads:
            thread.start()
        time.sleep(0.3)
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", NEW)
        for thread in threads:
            thread.join()
        assert found == [b"1"] * 8


@pytest.mark.slow
@pytest.mark.parametrize("code", ["ExpiredToken", "InvalidAccessKeyId", "SignatureDoesNotMatch"])
def test_keys_that_are_wrong_from_the_beginning_are_refused_at_once(gate, code):
    gate.code, gate.refused = code, frozenset({KEY})
    with a_store() as store:
        for count, verb in enumerate(VERBS, start=1):
            with pytest.raises(StoreDenied, match=rf"check the credentials.*\({code}\)$") as caught:
                verb(store)
            assert "\n" not in str(caught.value)
            assert gate.asked == count


@pytest.mark.slow
def test_a_refusal_that_lasts_is_one_line_that_says_for_how_long_it_was_borne(gate):
    with a_store(refused_s_max=0.6) as store:
        store.put("a", b"1")
        gate.refused = frozenset({KEY})
        with pytest.raises(StoreDenied, match=r"\(ExpiredToken\); so it was at \d+ attempts within 0.6 s") as caught:
            store.put("a", b"2")
        assert "\n" not in str(caught.value)
        assert not isinstance(caught.value, DeniedForNow)


@pytest.mark.slow
@pytest.mark.parametrize("code", ["AccessDenied", "NoSuchBucket", "EntityTooLarge", "InvalidObjectState"])
def test_what_does_not_pass_is_refused_at_once_though_the_store_has_answered(gate, code):
    with a_store() as store:
        store.put("a", b"1")
        gate.code, gate.refusals, gate.asked = code, 1, 0
        with pytest.raises(StoreDenied):
            store.put("a", b"2")
        assert gate.asked == 1


class FullFor:
    """`os.write` on a disk that is full for so many calls."""

    def __init__(self, calls: int, code: int) -> None:
        self.left, self.code, self.write = calls, code, os.write

    def __call__(self, descriptor: int, body: bytes) -> int:
        if self.left:
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return self.write(descriptor, body)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_write_waits_for_room(tmp_path, monkeypatch, code):
    store = LocalStore(tmp_path, refused_s_max=60.0)
    store.put("a", b"1")
    for write in (lambda: store.put("a", b"2"), lambda: store.create("b", b"3"), lambda: commit(store, "c", b"4")):
        full = FullFor(1, code)
        with monkeypatch.context() as patched:
            patched.setattr(os, "write", full)
            assert write() is not False
        assert full.left == 0
    assert [store.get(key) for key in "abc"] == [b"2", b"3", b"4"]
    assert not list(tmp_path.rglob(".tmp-*"))


def test_a_disk_that_stays_full_is_one_line_and_one_that_was_full_at_first_is_told_at_once(tmp_path, monkeypatch):
    full = FullFor(1000, errno.ENOSPC)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreDenied, match=r"free some space there or choose another directory$"):
        LocalStore(tmp_path).put("a", b"1")
    assert full.left == 999
    store = LocalStore(tmp_path, refused_s_max=0.2)
    with pytest.raises(ObjectMissing):
        store.get("a")
    with pytest.raises(StoreDenied, match=r"free some space.*; so it was at \d attempts within 0.2 s$"):
        store.put("a", b"1")


def test_a_file_that_may_not_be_so_large_is_not_waited_for(tmp_path, monkeypatch):
    store = LocalStore(tmp_path)
    store.put("a", b"1")
    full = FullFor(1000, errno.EFBIG)
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreDenied, match="File too large"):
        store.put("a", b"2")
    assert full.left == 999


def test_other_errors_show_no_store_that_answers():
    refusals = Refusals(60.0)

    def refuse(error: Exception) -> None:
        raise error

    for error in (StoreUnfit("no links"), StoreDenied("no right"), DeniedForNow("full")):
        with pytest.raises((StoreUnfit, StoreDenied), match=str(error)):
            refusals.outlast(lambda error=error: refuse(error))
