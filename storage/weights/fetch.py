"""Fetches the tensors of one weight version: finds the cheapest way to each, and reads the bytes of the way.

A way starts at bytes that are stored whole or held by this machine, and leads over differences to the wanted version
(docs/format.md section 7, algorithm V). This module does not know how versions are published or how the cache works.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from storage.digests import digest_of
from storage.records import layout, records
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.threads import Check, in_threads
from storage.weights import deltas
from storage.weights.cache import WeightCache
from storage.weights.changes import Changes
from storage.weights.manifest import ITEM_BYTES, Manifest, TensorBlock, TensorEntry
from storage.weights.objects import THREADS, layouts, read_pieces

log = logging.getLogger(__name__)
GROUP_BYTES = 128 << 20  # of differences, in memory at a time


@dataclass(frozen=True)
class PlacedManifest:
    """A manifest, and the version whose prefix holds the manifest and its objects."""

    version: int
    key: str
    manifest: Manifest = field(compare=False)


@dataclass(frozen=True)
class Way:
    """A way to a tensor: the start, then differences to apply.

    Attributes:
        start: stored whole under a manifest, or held by this machine; None: not found yet.
        differences: manifests of the differences, the newest first.
        num_bytes: bytes to read from the store.
        version: version of the start.
    """

    start: PlacedManifest | TensorBlock | None = None
    differences: tuple[PlacedManifest, ...] = ()
    num_bytes: int = 0
    version: int = 0


Pieces = dict[tuple[str, str], TensorBlock]  # by manifest key and tensor name


@dataclass
class Fetch:
    """One pull of `version`, whose manifest was read.

    Attributes:
        check: called now and then; its exception ends the pull.
        changes: gets the elements that the differences change.
    """

    store: ObjectStore
    version: int
    manifest: Manifest
    cache: WeightCache | None
    check: Check
    changes: Changes | None = None
    _manifests: dict[int, Manifest] = field(default_factory=dict)
    _walked: set[int] = field(default_factory=set)

    def tensors(self, names: list[str]) -> dict[str, TensorBlock]:
        """The named tensors, verified. Raises ObjectMissing, or CorruptObject for objects that contradict the manifest.

        Memory holds the tensors, at most GROUP_BYTES of differences, and the unpacked differences of THREADS tensors.
        """
        self._manifests[self.version] = self.manifest
        fetched: dict[str, TensorBlock] = {}
        try:
            self._fetch(names, fetched, past_whole=True)
        except ObjectMissing as error:
            # What lies before a version that is stored whole may be deleted at any time, even while it is read.
            log.info("weight version %d: %s; starting at a version that is stored whole", self.version, error)
            self._fetch([name for name in names if name not in fetched], fetched, past_whole=False)
        return fetched

    def _fetch(self, names: list[str], fetched: dict[str, TensorBlock], *, past_whole: bool) -> None:
        """Add the named tensors to `fetched`, group by group."""
        for group in _groups(self._ways(names, past_whole=past_whole)):
            # The bytes read for one group are freed before the next group is read.
            fetched.update(in_threads(THREADS, partial(self._go, self._read(group)), group.items(), self.check))

    def _ways(self, names: list[str], *, past_whole: bool) -> dict[str, Way]:
        """For each tensor the way with the fewest bytes, found by walking back from the wanted version.

        Beyond a version that is stored whole, only tensors held by this machine can be cheaper. The walk therefore
        continues only with `past_whole`, and only to the newest version of which this machine holds a tensor.
        """
        held = self.cache.newest_held(self.store.url, self.version) if self.cache and past_whole else None
        best: dict[str, Way] = {}
        unfinished = {name: Way() for name in names}
        at = self.version
        while True:
            self._walked.add(at)
            link = self._link(at, past_whole=held is not None and held < at)
            self._start_from_held(at, unfinished, best)
            for name, way in list(unfinished.items()):
                longer = self._step(at, name, way, best, link)
                if longer is None or (name in best and longer.num_bytes >= best[name].num_bytes):
                    del unfinished[name]
                else:
                    unfinished[name] = longer
            settled = unfinished.keys() <= best.keys()
            if link is None or not unfinished or (settled and (held is None or at <= held)):
                break
            at = base_of(link.manifest, at) or 0
            try:
                self._manifest_at(at)
            except ObjectMissing:
                if settled:
                    break
                raise
        return {name: best[name] for name in names}

    def _start_from_held(self, at: int, unfinished: dict[str, Way], best: dict[str, Way]) -> None:
        """End the ways whose tensor this machine holds as it was at version `at`."""
        if self.cache is None or at == self.version:
            return
        manifest = self._manifest_at(at)
        entries = {name: manifest.tensors[name] for name in unfinished if name in manifest.tensors}
        for name, block in self.cache.find(entries, self.check).items():
            best[name] = replace(unfinished.pop(name), start=block, version=at)

    def _step(self, at: int, name: str, way: Way, best: dict[str, Way], link: PlacedManifest | None) -> Way | None:
        """Note in `best` a start at version `at`; returns the way that leads one version further back, if any."""
        manifest = self._manifest_at(at)
        entry = manifest.tensors.get(name)
        if entry is None:
            if name in best:
                return None
            raise CorruptObject(_manifest_key(at), f"no tensor {name!r}, which a later version is based on")
        if entry.encoding == "full":
            num_bytes = way.num_bytes + entry.num_bytes
            if name not in best or num_bytes < best[name].num_bytes:
                best[name] = Way(self._place(at, name, entry), way.differences, num_bytes, at)
        step = link.manifest.tensors.get(name) if link else None
        if link is None or step is None or step.encoding == "full" or step.digest != entry.digest:
            return None
        if step.encoding == "same":
            return way
        return Way(None, (*way.differences, link), way.num_bytes + (step.stored_bytes or 0))

    def _link(self, at: int, *, past_whole: bool) -> PlacedManifest | None:
        """The manifest that describes `at` as differences; for a version that is stored whole, only if `past_whole`."""
        manifest = self._manifest_at(at)
        prefix = layout.weights(at)
        if any(entry.encoding != "full" for entry in manifest.tensors.values()):
            return PlacedManifest(at, layout.manifest(prefix), manifest)
        if not past_whole:
            return None
        key = layout.delta_manifest(prefix)
        try:
            delta = records.read(self.store, Manifest, key)
        except ObjectMissing:
            return None
        # Two trainers may have published. A difference that leads to another result than the manifest's is not
        # followed.
        return PlacedManifest(at, key, delta) if delta.base is not None else None

    def _place(self, at: int, name: str, entry: TensorEntry) -> PlacedManifest:
        """The place of the whole tensor that `entry`, of version `at`, describes."""
        if entry.version is None:
            return PlacedManifest(at, _manifest_key(at), self._manifest_at(at))
        there = self._manifest_at(entry.version)
        target = there.tensors.get(name)
        if target is None or target.payload != entry.payload or (target.object, target.version) != (entry.object, None):
            raise CorruptObject(_manifest_key(at), f"tensor {name!r} is not what version {entry.version} stores")
        return PlacedManifest(entry.version, _manifest_key(entry.version), there)

    def _read(self, ways: Mapping[str, Way]) -> Pieces:
        """The pieces of the ways, read from the store and verified."""
        wanted: dict[PlacedManifest, list[str]] = {}
        for name, way in ways.items():
            for place in (way.start, *way.differences):
                if isinstance(place, PlacedManifest):
                    wanted.setdefault(place, []).append(name)
        found = [
            (each, place, names)
            for place, names in wanted.items()
            for each in layouts(place.manifest, place.key, layout.weights(place.version), names)
        ]
        blocks = read_pieces(self.store, [(each, set(names)) for each, _, names in found], self.check)
        return {
            (place.key, piece.name): blocks[each.key, piece.name]
            for each, place, names in found
            for piece in each.pieces
            if (each.key, piece.name) in blocks and piece.name in names
        }

    def _go(self, pieces: Pieces, named: tuple[str, Way]) -> tuple[str, TensorBlock]:
        """The tensor at the end of its way; raises CorruptObject if dtype, shape or digest contradict the manifest."""
        name, way = named
        entry = self.manifest.tensors[name]
        start = pieces[way.start.key, name] if isinstance(way.start, PlacedManifest) else way.start
        if start is None or (start.dtype, start.shape) != (entry.dtype, entry.shape):
            raise CorruptObject(_manifest_key(self.version), f"tensor {name!r} is based on a tensor of another shape")
        if not way.differences and isinstance(way.start, PlacedManifest) and self._is_result(way.start.manifest, name):
            return name, start
        data = memoryview(start.data)
        if way.differences and not isinstance(way.start, PlacedManifest):
            # Memory from the cache is shared in this process; what was read just now may be changed in place.
            data = np.frombuffer(data, np.uint8).copy().data
        key = _manifest_key(self.version)
        changed: list[deltas.Indices] | None = None if self.changes is None or self.changes.are_too_many else []
        for place in reversed(way.differences):
            key = place.key
            try:
                deltas.apply(pieces[key, name].data, data, ITEM_BYTES[entry.dtype], changed)
            except ValueError as error:
                raise CorruptObject(key, f"tensor {name!r}: {error}") from None
        if digest_of(data) != entry.digest:
            raise CorruptObject(key, f"tensor {name!r}: its differences do not lead to the digest {entry.digest}")
        # A version beside the chain may differ elsewhere.
        if self.changes is not None and changed and self.changes.since in self._walked:
            self.changes.note(self.manifest, name, way.version, changed)
        return name, TensorBlock(entry.dtype, entry.shape, data)

    def _is_result(self, source: Manifest, name: str) -> bool:
        """Whether the digest verified on reading is the wanted one."""
        return source.tensors[name].digest == self.manifest.tensors[name].digest

    def _manifest_at(self, version: int) -> Manifest:
        if version not in self._manifests:
            self._manifests[version] = records.read(self.store, Manifest, _manifest_key(version))
        return self._manifests[version]


def _groups(ways: Mapping[str, Way]) -> Iterator[dict[str, Way]]:
    """The ways in groups with at most GROUP_BYTES of differences; a single way may have more."""
    group: dict[str, Way] = {}
    total = 0
    for name, way in ways.items():
        num_bytes = sum(place.manifest.tensors[name].stored_bytes or 0 for place in way.differences)
        if group and total + num_bytes > GROUP_BYTES:
            yield group
            group, total = {}, 0
        group[name] = way
        total += num_bytes
    yield group


def base_of(manifest: Manifest, version: int) -> int | None:
    """The version that this version's differences refer to; raises CorruptObject unless that is an earlier one."""
    if manifest.base is not None and not 0 <= manifest.base < version:
        raise CorruptObject(_manifest_key(version), f"base: value {manifest.base}; allowed: 0 to {version - 1}")
    return manifest.base


def _manifest_key(version: int) -> str:
    return layout.manifest(layout.weights(version))
