"""Copies of a run's tensor objects on the host's local disk, so that a state need not be read from the object store.

An object's name is its digest, and the manifest that names it is always read from the object store. So a copy of
another state is never asked for, and a damaged one is found when its tensors are compared with their digests.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from storage import layout
from storage.store import CorruptObject, ObjectMissing, ObjectStore, StorageError, read_into
from storage.weights.tensor_sets import read_manifest

log = logging.getLogger(__name__)
Result = TypeVar("Result")
TENSORS = layout.tensor_object("", "")


class StoreWithCopies:
    """A run's store, some of whose tensor objects have copies on `disk`; what is not there is read from the store.

    Trouble with the disk costs time and nothing more. Several threads may use it. bytes_near, bytes_far: how many bytes
    of tensors were read from the disk and from the store.
    """

    def __init__(self, store: ObjectStore, disk: ObjectStore) -> None:
        self._store = store
        self._disk = disk
        self._copied = ""
        self._lock = threading.Lock()
        self.bytes_near = self.bytes_far = 0

    @property
    def url(self) -> str:
        return self._store.url

    def copy_from_now(self, prefix: str) -> None:
        """Copy every tensor object that is written below `prefix` from now on, and drop the copies of others.

        Those of weight version 0 stay, because they never change.
        """
        self._copied = prefix
        stay = (prefix, layout.weights(0))
        try:
            for key in self._disk.list(""):
                if not key.startswith(stay):
                    self._disk.delete(key)
        except StorageError as error:
            self._complain(error)

    def copy_stored(self, prefix: str) -> None:
        """Copy the tensor objects that are stored below `prefix`, unless they are copied; raises what reading does."""
        for name in read_manifest(self._store, prefix).objects:
            key = layout.tensor_object(prefix, name)
            try:
                self._disk.get(key, 0, 1)
            except ObjectMissing:
                self._copy(key, self._store.get(key))
            except StorageError as error:
                self._complain(error)

    def read_sound(
        self,
        read: Callable[[], Result],
        agree: Callable[[bool], bool] = bool,
        heard: tuple[type[Exception], ...] = (),
    ) -> Result:
        """What `read` returns, which reads through this store; if a copy was damaged, all is read again without any.

        agree: of several ranks that read together, whether a copy was damaged for any, given whether one was here.
        heard: what `read` raises where it failed on another rank. Raises what `read` raises.
        """
        near = self.bytes_near
        # Every rank has to be asked: one that fails otherwise may be the reason why the others hear of a failure.
        caught: tuple[type[Exception], ...] = (StorageError, *heard)
        try:
            return read()
        except caught as error:
            if not agree(isinstance(error, CorruptObject) and self.bytes_near > near):
                raise
            log.warning("a copy on the local disk: %s; the object store is read", error)
        self.drop_copies()
        return read()

    def drop_copies(self) -> None:
        """Remove all copies."""
        self._copied = ""
        try:
            for key in self._disk.list(""):
                self._disk.delete(key)
        except StorageError as error:
            self._complain(error)

    def create(self, key: str, body: bytes) -> bool:
        created = self._store.create(key, body)
        if self._copied and key.startswith(self._copied) and key.endswith(TENSORS):
            self._copy(key, body)
        return created

    def put(self, key: str, body: bytes) -> None:
        self._store.put(key, body)

    def get(self, key: str, start: int = 0, end: int | None = None) -> bytes:
        if not key.endswith(TENSORS):
            return self._store.get(key, start, end)
        try:
            body = self._disk.get(key, start, end)
        except StorageError as error:
            self._complain(error)
            body = self._store.get(key, start, end)
            self._count(far=len(body))
        else:
            self._count(near=len(body))
        return body

    def get_into(self, key: str, start: int, view: memoryview) -> int:
        if not key.endswith(TENSORS):
            return read_into(self._store, key, start, view)
        try:
            length = read_into(self._disk, key, start, view)
        except StorageError as error:
            self._complain(error)
            length = read_into(self._store, key, start, view)
            self._count(far=length)
        else:
            self._count(near=length)
        return length

    def list(self, prefix: str, after: str = "") -> list[str]:
        return self._store.list(prefix, after)

    def delete(self, key: str) -> None:
        self._store.delete(key)

    def _copy(self, key: str, body: bytes) -> None:
        try:
            self._disk.put(key, body)
        except StorageError as error:
            self._complain(error)

    def _complain(self, error: StorageError) -> None:
        if not isinstance(error, ObjectMissing):
            log.warning("the local disk: %s; going on without", error)

    def _count(self, near: int = 0, far: int = 0) -> None:
        with self._lock:
            self.bytes_near += near
            self.bytes_far += far
