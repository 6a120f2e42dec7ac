"""A store in memory whose client is killed at a chosen write."""

from collections.abc import Mapping

from storage.stores.memory import MemoryStore


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAtWrite(MemoryStore):
    """Holds copies of `objects`; its client is killed instead of being let write for the k-th time."""

    def __init__(self, name: str, objects: Mapping[str, bytes], writes: int = 1 << 30) -> None:
        super().__init__(name)
        self._objects.update(objects)
        self.left = writes
        self.written: list[str] = []

    def create(self, key: str, body: bytes) -> bool:
        self._count(key)
        return super().create(key, body)

    def put(self, key: str, body: bytes) -> None:
        self._count(key)
        super().put(key, body)

    def _count(self, key: str) -> None:
        if self.left == 0:
            raise Killed
        self.left -= 1
        self.written.append(key)


class ProgramDies(DiesAtWrite):
    """Counts the writes of a program outside the crew alone: members live on."""

    def _count(self, key: str) -> None:
        if not any(f"/{written}/" in key for written in ("journal", "alive", "claims")):
            super()._count(key)
