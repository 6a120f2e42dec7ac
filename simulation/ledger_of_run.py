"""The ledgers of all iterations of a run over one true store, and the rules of what retention may delete when.

docs/format.md section 9 says what may go, and in which order; the rules are checked at the moment of each deletion.
"""

from collections.abc import Iterator
from typing import Any

from simulation.ledger import Ledger
from simulation.stored_objects import body_of
from simulation.virtual_time import Timeline
from storage.records import layout
from storage.records.run import exists, next_iteration
from storage.stores.memory import MemoryStore
from storage.weights.stored_versions import list_versions

LENGTH_TABLES_KEPT = 4
ERASED = ("journal", "asks", "alive", "claims")


class LedgerOfRun:
    """What really happened to a run. `common` is the ledger of what belongs to no iteration."""

    def __init__(self, timeline: Timeline) -> None:
        self.common = Ledger(lambda: timeline.now_s, iteration=-1, of=self.of, deletes=self._deletes)
        self.iterations: list[Ledger] = []

    @property
    def store(self) -> MemoryStore:
        """The true store."""
        return self.common.store

    def begin(self, timeline: Timeline) -> Ledger:
        """The ledger of the next iteration, which begins now."""
        ledger = Ledger(
            lambda: timeline.now_s,
            iteration=len(self.iterations),
            zero_s=timeline.zero_s,
            of=self.of,
            deletes=self._deletes,
            store=self.common.store,
            events=self.common.events,
            broken=self.common.broken,
        )
        # The path writes an iteration's plan before its crew comes.
        for key, body in self.common.created.items():
            if key.startswith(layout.iteration(ledger.iteration)):
                ledger.created[key], ledger.created_at_s[key] = body, 0.0
        self.iterations.append(ledger)
        return ledger

    def of(self, key: str) -> Ledger:
        """The ledger to which a key belongs."""
        number = _number(key, layout.ITERATIONS)
        return self.iterations[number] if number is not None and number < len(self.iterations) else self.common

    def beats_between(self, since_s: float, until_s: float) -> bool:
        """Whether the execution or a member gave a sign of life between these true times.

        A zombie of an iteration that was concluded before is no member any more, and its heartbeats are not looked at.
        """
        beats = list(self.common.lease_beats_s)
        for number, ledger in enumerate(self.iterations):
            beats += ledger.lease_beats_s
            concluded_s = ledger.created_at_s.get(layout.report(number))
            if concluded_s is not None and ledger.zero_s + concluded_s < since_s:
                continue
            beats += [ledger.zero_s + beat.at_s for told in ledger.beats.values() for beat in told]
        return any(since_s < at_s < until_s for at_s in beats)

    def _deletes(self, who: str, key: str) -> bool:
        """Note a deletion that is about to happen; returns whether the format allows it now."""
        ledger = self.of(key)
        if not exists(self.store, key):
            return True
        ledger.deleted.setdefault(key, self.store.get(key))
        ledger.tell(who, f"is about to delete {key}")
        iteration = _number(key, layout.ITERATIONS)
        if iteration is not None:
            return self._may_erase(ledger, key.split("/")[2])
        if key.startswith(layout.LENGTHS):
            return self._is_old_table(key)
        return any(self._may_drop(key, prefix) for prefix in (layout.WEIGHTS, layout.CHECKPOINTS))

    def _is_old_table(self, key: str) -> bool:
        """Whether this length table is none of the newest committed ones, which plans and conclusions read."""
        committed = range(next_iteration(self.store))
        tables = [each for each in self.store.list(layout.LENGTHS) if layout.lengths_iteration(each) in committed]
        return key in tables[:-LENGTH_TABLES_KEPT]

    def _may_erase(self, ledger: Ledger, kind: str) -> bool:
        """Algorithm E.1: only of a committed iteration that is compacted and closed; shards go first, claims last."""
        number = ledger.iteration
        needed = (layout.report(number), layout.responses(number), layout.closed(number))
        if kind not in ERASED or not all(exists(self.store, name) for name in needed):
            return False
        concluded_s = ledger.created_at_s[layout.report(number)]
        if kind == "journal":
            return True
        # What a frozen member writes after the report may come after the sweep has listed.
        left = self.store.list(layout.journal(number))
        return not any(ledger.created_at_s.get(found, concluded_s) < concluded_s for found in left)

    def _may_drop(self, key: str, prefix: str) -> bool:
        """Algorithm E.2 and E.3: only versions that no later reader needs, the manifest first."""
        version = _number(key, prefix)
        if version is None:
            return False
        current, folder = next_iteration(self.store), f"{prefix}{version:08d}/"
        # Without its manifest a version does not exist, and without its delta no reader looks for what that names.
        first = [layout.manifest(folder), layout.delta_manifest(folder)]
        first = first[: first.index(key)] if key in first else first
        if any(exists(self.store, name) for name in first) or version >= current:
            return False
        if prefix == layout.CHECKPOINTS:
            return list_versions(self.store, prefix).newest_up_to(current) > version
        named = {0, current, *self._sampled_in_flight()}
        return version not in {base for one in named for base in self._read_with(one)}

    def _sampled_in_flight(self) -> Iterator[int]:
        """The versions that the plans of uncommitted iterations name."""
        for number in range(len(self.iterations) + 1):
            key = layout.plan(number)
            if exists(self.store, key) and not exists(self.store, layout.report(number)):
                yield self._body(key, "plan")["weight_version"]

    def _read_with(self, version: int) -> set[int]:
        """The versions whose objects a reader of `version` needs (section 7); empty if that is not published."""
        key = layout.manifest(layout.weights(version))
        if not exists(self.store, key):
            return set()
        manifest = self._body(key, "manifest")
        base, tensors = manifest.get("base"), manifest["tensors"].values()
        needed = {version, *(tensor["version"] for tensor in tensors if tensor.get("version") is not None)}
        return needed if base is None else needed | self._read_with(base)

    def _body(self, key: str, kind: str) -> Any:
        return body_of(key, kind, self.store.get(key))


def _number(key: str, prefix: str) -> int | None:
    """The number after `prefix` in a key."""
    number = key.removeprefix(prefix).partition("/")[0]
    return int(number) if key.startswith(prefix) and number.isdecimal() else None
