"""PullAhead: a thread of the member pulls the weights for the first session while the engine starts.

Nothing depends on the thread: after a failed pull the session pulls again and reports the errors.
"""

import logging
import threading
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Self

from storage.clock import Clock
from storage.stores.store import ObjectStore
from storage.weights.cache import WeightCache
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.adapted_weights import AdaptedWeights
from tasks.sampling.session.pulled_model import pull_model

log = logging.getLogger(__name__)
_LOOK_INTERVAL_S = 0.1
# A member that was told to go has little time left, and the thread dies with its process.
_END_TIMEOUT_S = 2.0


class _NotNeededError(Exception):
    """The member leaves; the pull is given up."""


class PullAhead:
    """One weight version, pulled from the moment the object is made; leaving its block gives the pull up."""

    def __init__(self, store: ObjectStore, version: int, cache: WeightCache | None, clock: Clock) -> None:
        self._version = version
        self._tensors: Mapping[str, TensorBlock] | None = None
        self._is_given_up = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._pull, args=(store, cache, clock), name="pull-ahead", daemon=True)
        self._thread.start()

    def take(self, version: int, heed: Callable[[], None]) -> Mapping[str, TensorBlock] | None:
        """The tensors of a version, once; None if the pull failed, or if the thread pulls another version and gives up.

        heed: is called while the pull goes on, and at its end; its exception ends the waiting.
        """
        if version != self._version:
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
        self._thread.join(_END_TIMEOUT_S)

    def _give_up(self) -> None:
        self._is_given_up, self._tensors = True, None

    def _pull(self, store: ObjectStore, cache: WeightCache | None, clock: Clock) -> None:
        try:
            _, tensors = pull_model(store, self._version, cache, clock, check=self._check)
            if isinstance(tensors, AdaptedWeights):
                tensors.base()
            self._tensors = None if self._is_given_up else tensors
        except _NotNeededError:
            pass
        except Exception as error:  # noqa: BLE001 - the session pulls again, and its error is the one to report
            log.info("weight version %d was not pulled ahead: %s", self._version, error)
        finally:
            self._ended.set()

    def _check(self) -> None:
        if self._is_given_up:
            raise _NotNeededError
