"""StepGraphs: decode steps that are recorded once for each size of a batch, and launched as a whole from then on.

On a GPU a recording is a CUDA graph: the operations of a step with the addresses of their tensors. So the batch lies in
tensors that stay and is filled up to one of few sizes, and recordings are dropped when the cache moves. Weights stay
at their addresses (`Decoder.load`). If a step cannot be recorded, all are launched operation by operation.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tasks.sampling.engines.batch import Batch

_LOG = logging.getLogger(__name__)
# Recordings at a time. Each takes some megabytes; the tensors between the operations are shared by all.
_KEPT_MAX = 48

Launch = Callable[[], Tensor]
"""Puts a step on the device and returns what it gives, at the same address each time if it is a recording."""


class Record(Protocol):
    """Makes a recording of a step without running it. `pool` is the memory that recordings share, None for the first.

    Any exception from the recorder means that the step cannot be recorded.
    """

    def __call__(self, step: Launch, pool: Any) -> tuple[Launch, Any]:
        """The recording, and its pool."""
        ...


class StepGraphs:
    """Recordings for batches of up to `rows` responses."""

    def __init__(self, rows: int, record: Record) -> None:
        self._rows = rows
        self._record: Record | None = record
        self._static: dict[str, Tensor] = {}
        self._pool: Any = None
        self._capacity = 0
        # By size, width and way to sample; None after the first step, which compiles and loads what a recording needs.
        self._recorded: dict[tuple[int, int, bool, bool], Launch | None] = {}

    def size(self, count: int) -> int:
        """How many rows a batch of `count` responses is filled up to: at most a quarter more, four sizes an octave."""
        multiple = max(1, 1 << (count - 1).bit_length() >> 3)
        return min(-(-count // multiple) * multiple, self._rows)

    def placed(self, batch: Batch) -> Batch:
        """The batch in the tensors that recordings read; it replaces the batch before."""
        if not self._static:
            self._static = {name: one.new_zeros(self._rows, *one.shape[1:]) for name, one in batch.tensors().items()}
        return batch.within(self._static)

    def run(self, batch: Batch, capacity: int, step: Launch, width: int = 1) -> Tensor:
        """A step of a batch of `placed`, recorded if it was run before.

        `capacity` is the cache's, and `width` the number of tokens per row that the step feeds.
        """
        if capacity != self._capacity:
            self._drop()
            self._capacity = capacity
        key = (len(batch.token_ids), width, batch.truncated, batch.greedy)
        if self._record is None:
            return step()
        if key not in self._recorded:
            if len(self._recorded) == _KEPT_MAX:
                del self._recorded[next(iter(self._recorded))]
            self._recorded[key] = None
            return step()
        recorded = self._recorded[key]
        if recorded is None:
            try:
                recorded, self._pool = self._record(step, self._pool)
            except Exception as error:  # noqa: BLE001 - drivers and libraries raise any type; the operations always work
                reason = " ".join(f"{type(error).__name__}: {error}".split())[:200]
                _LOG.warning("steps are launched operation by operation, which costs time only: %s", reason)
                self._record = None
                self._drop()
                return step()
            self._recorded[key] = recorded
        return recorded()

    def _drop(self) -> None:
        # A pool ends with the last recording in it.
        self._recorded.clear()
        self._pool = None


def record_on_gpu(step: Launch, pool: Any) -> tuple[Launch, Any]:
    """`Record` of a CUDA graph."""
    shared = torch.cuda.graph_pool_handle() if pool is None else pool
    graph = torch.cuda.CUDAGraph()
    # If recording fails, torch leaves its stream the current one. Other threads of the member may use the device.
    with (
        torch.cuda.stream(torch.cuda.current_stream()),
        torch.cuda.graph(graph, pool=shared, capture_error_mode="thread_local"),
    ):
        found = step()

    def launch() -> Tensor:
        graph.replay()
        return found

    return launch, shared
