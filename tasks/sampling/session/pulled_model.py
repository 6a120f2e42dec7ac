"""The model at a weight version, whichever way that is stored: whole, as differences, or as an adapter."""

import logging
import threading
from collections.abc import Callable, Mapping
from functools import partial
from types import TracebackType
from typing import Self

from storage.clock import Clock
from storage.records import layout
from storage.stores.store import ObjectStore
from storage.threads import Check
from storage.weights.adapters import BASE_VERSION, adapter_of, adapter_record
from storage.weights.cache import WeightCache
from storage.weights.changes import Changes
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.sampling.engines.adapted_weights import AdaptedWeights
from tasks.sampling.engines.engine import Engine
from tasks.sampling.engines.patched_weights import PatchedWeights

log = logging.getLogger(__name__)
_LOOK_INTERVAL_S = 0.1
# A member that was told to go has little time left, and the thread dies with its process.
_END_TIMEOUT_S = 2.0


def pull_model(
    store: ObjectStore,
    version: int,
    cache: WeightCache | None,
    clock: Clock,
    *,
    check: Check = lambda: None,
    held: int | None = None,
) -> tuple[Manifest, Mapping[str, TensorBlock]]:
    """The manifest of a weight version, and all tensors of the model, verified; arguments and errors of `pull_version`.

    `held` is an engine's `patch_base`, for which a version stored as tensors gives PatchedWeights. An adapter gives
    AdaptedWeights. Every byte that is merged was verified: the factors here, and version 0, which the cache keeps, when
    it is read.
    """
    changes = None if held is None or held == version else Changes(held)
    manifest, tensors = pull_version(store, version, cache, clock, check=check, changes=changes)
    if adapter_record(manifest, version) is None:
        if changes is None:
            return manifest, tensors
        read_places = partial(changes.places, store, version, manifest, tensors, cache, check)
        return manifest, PatchedWeights(tensors, changes.since, read_places)
    base = read_manifest(store, layout.weights(BASE_VERSION))
    adapter = adapter_of(manifest, version, tensors, {name: entry.shape for name, entry in base.tensors.items()})
    assert adapter is not None

    def read_base() -> Mapping[str, TensorBlock]:
        return pull_version(store, BASE_VERSION, cache, clock, check=check)[1]

    return manifest, AdaptedWeights(adapter, read_base)


class _NotNeededError(Exception):
    """The member leaves; the pull is given up."""


class WeightSource:
    """The weight versions of a run, for one engine. One version may be pulled while the engine starts.

    Nothing depends on the thread for that version: after a failed pull `load` pulls again and raises the errors.
    Leaving the block gives the pull up.
    """

    def __init__(self, store: ObjectStore, cache: WeightCache | None, clock: Clock, ahead: int | None = None) -> None:
        """ahead: a version that a thread pulls from now on."""
        self._store = store
        self._cache = cache
        self._clock = clock
        self._ahead = ahead
        self._tensors: Mapping[str, TensorBlock] | None = None
        self._is_given_up = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pull_ahead, name="pull-ahead", daemon=True)
        if ahead is not None:
            self._thread.start()

    def load(self, engine: Engine, version: int, heed: Callable[[], None]) -> None:
        """Give the engine a weight version; raises what `pull_version` raises.

        heed: is called while the pull goes on; its exception ends the pull.
        """
        tensors = self.take(version, heed)
        if tensors is None:
            held = engine.patch_base
            _, tensors = pull_model(self._store, version, self._cache, self._clock, check=heed, held=held)
        engine.load_weights(version, tensors)

    def take(self, version: int, heed: Callable[[], None]) -> Mapping[str, TensorBlock] | None:
        """The tensors of a version, once; None if the pull failed, or if the thread pulls another version and gives up.

        heed: is called while the pull goes on, and at its end; its exception ends the waiting.
        """
        if version != self._ahead:
            self._give_up()
            return None
        while not self._ended.wait(_LOOK_INTERVAL_S):
            heed()
        heed()
        tensors, self._tensors = self._tensors, None
        return tensors

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._give_up()
        if self._thread.is_alive():
            self._thread.join(_END_TIMEOUT_S)

    def _give_up(self) -> None:
        self._is_given_up, self._tensors = True, None

    def _pull_ahead(self) -> None:
        assert self._ahead is not None
        try:
            _, tensors = pull_model(self._store, self._ahead, self._cache, self._clock, check=self._check)
            if isinstance(tensors, AdaptedWeights):
                tensors.base()
            self._tensors = None if self._is_given_up else tensors
        except _NotNeededError:
            pass
        except Exception as error:  # noqa: BLE001 - `load` pulls again, and its error is the one to report
            log.info("weight version %d was not pulled ahead: %s", self._ahead, error)
        finally:
            self._ended.set()

    def _check(self) -> None:
        if self._is_given_up:
            raise _NotNeededError
