"""AdaptedWeights: a weight version published as an adapter, for engines with and without an adapter of their own."""

from collections.abc import Callable, Iterator, Mapping

from storage.weights.adapters import Adapter
from storage.weights.tensor_sets import TensorBlock


class AdaptedWeights(Mapping[str, TensorBlock]):
    """All tensors of the model, merged when the first one is read. An engine with adapters of its own takes the parts.

    `adapter` fits the tensors of version 0, which `base` reads. What reading raises, every method may raise.
    """

    def __init__(self, adapter: Adapter, read_base: Callable[[], Mapping[str, TensorBlock]]) -> None:
        self.adapter = adapter
        self._read_base = read_base
        self._base: Mapping[str, TensorBlock] | None = None
        self._merged: Mapping[str, TensorBlock] | None = None

    def base(self) -> Mapping[str, TensorBlock]:
        """The tensors of version 0, which are kept for the merging."""
        if self._base is None:
            self._base = self._read_base()
        return self._base

    def __getitem__(self, name: str) -> TensorBlock:
        return self._model()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._model())

    def __len__(self) -> int:
        return len(self._model())

    def _model(self) -> Mapping[str, TensorBlock]:
        if self._merged is None:
            from tasks.sampling.engines.adapter_merge import merged_blocks  # noqa: PLC0415 - torch takes seconds

            self._merged, self._base = merged_blocks(self.base(), self.adapter), None
        return self._merged
