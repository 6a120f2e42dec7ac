"""Adapters: weight versions that are stored as version 0 and the two factors of each adapted layer.

Owns the record, the names and the checks of adapters (docs/format.md section 7). Callers add the factors to weights.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from storage.records import layout, records
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectStore
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.tensor_sets import Draft, digest_all, draft_set, read_manifest, same_tensors, with_metadata

ADAPTER = "adapter"  # in a manifest's metadata
FORMAT = 1
BASE_VERSION = 0
WEIGHT, FIRST, SECOND = ".weight", ".lora_A.weight", ".lora_B.weight"


@dataclass(frozen=True, kw_only=True)
class AdapterRecord:
    """The adapter in a manifest; the difference of a layer is alpha / rank * B A.

    Attributes:
        transposed: layers whose weight is stored as [inputs, outputs], as Conv1D of transformers does.
    """

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)
    format: int = FORMAT
    rank: int
    alpha: float
    transposed: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Adapter:
    """An adapter's factors by layer: A float32 [rank, inputs], and B float32 [outputs, rank]."""

    record: AdapterRecord
    layers: Mapping[str, tuple[TensorBlock, TensorBlock]]


def publish_adapter(
    store: ObjectStore,
    version: int,
    factors: Mapping[str, TensorBlock],
    record: AdapterRecord,
    metadata: Mapping[str, Any],
    *,
    before_manifest: Callable[[], Mapping[str, Any]] = dict,
) -> Manifest:
    """Publish weight version `version` (1 or more) as an adapter of version 0; returns the manifest that is stored.

    `factors` are named after their layers, `<layer>.lora_A.weight` and `<layer>.lora_B.weight`. Publishing equal
    factors again returns the first manifest. `before_manifest`: as in `publish_version`. Raises ConflictingRecord if
    other tensors are published as this version, ValueError if the factors do not fit version 0, ObjectMissing without a
    published version 0.
    """
    prefix = layout.weights(version)
    digests = digest_all(factors)
    if exists(store, layout.manifest(prefix)):
        before_manifest()
        return same_tensors(store, prefix, factors, digests)
    base = read_manifest(store, layout.weights(BASE_VERSION))
    _check_fits(_layers(factors, record), record, {name: entry.shape for name, entry in base.tensors.items()})
    drafts = {name: Draft.full(block, digests[name]) for name, block in factors.items()}
    drafted = draft_set(drafts, {**metadata, ADAPTER: asdict(record)}, base=BASE_VERSION)
    drafted.write_objects(store, prefix)
    manifest = with_metadata(drafted.manifest, before_manifest())
    if records.commit(store, layout.manifest(prefix), manifest):
        return manifest
    return same_tensors(store, prefix, factors, digests)


def adapter_record(manifest: Manifest, version: int) -> AdapterRecord | None:
    """The record of a weight version that is stored as an adapter; None for a version with the model's tensors.

    Raises CorruptObject, which names the manifest, for a record of another format or with other fields.
    """
    stated = manifest.metadata.get(ADAPTER)
    if stated is None:
        return None
    key = layout.manifest(layout.weights(version))
    found = stated.get("format") if isinstance(stated, dict) else stated
    if found != FORMAT:
        raise CorruptObject(
            key, f"adapter: format {found!r}; this version of Gleaner reads adapters of format {FORMAT}"
        )
    try:
        # Through JSON, so that lists become tuples.
        record = TypeAdapter(AdapterRecord).validate_json(json.dumps(stated))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, (ADAPTER, *first["loc"])))
        raise CorruptObject(key, f"{place}: {first['msg']}") from None
    if manifest.base != BASE_VERSION:
        raise CorruptObject(key, f"base: value {manifest.base}; allowed for an adapter: {BASE_VERSION}")
    return record


def adapter_of(
    manifest: Manifest, version: int, factors: Mapping[str, TensorBlock], base: Mapping[str, tuple[int, ...]]
) -> Adapter | None:
    """The adapter that was pulled as weight version `version`; None for a version with the model's tensors.

    `base`: the shapes of version 0. Raises CorruptObject, which names the manifest, if the factors do not fit them.
    """
    record = adapter_record(manifest, version)
    if record is None:
        return None
    try:
        layers = _layers(factors, record)
        _check_fits(layers, record, base)
    except ValueError as error:
        raise CorruptObject(layout.manifest(layout.weights(version)), str(error)) from None
    return Adapter(record=record, layers=layers)


def loaded_bytes(store: ObjectStore, version: int) -> int:
    """The bytes that a reader of a weight version holds: its tensors, and for an adapter also those of version 0.

    Raises ObjectMissing, CorruptObject.
    """
    manifest = read_manifest(store, layout.weights(version))
    if adapter_record(manifest, version) is None:
        return manifest.num_bytes
    return manifest.num_bytes + read_manifest(store, layout.weights(BASE_VERSION)).num_bytes


def _layers(factors: Mapping[str, TensorBlock], record: AdapterRecord) -> dict[str, tuple[TensorBlock, TensorBlock]]:
    """Both factors of each layer; raises ValueError if a factor is missing or has no right name, dtype or shape."""
    names = [name.removesuffix(FIRST) for name in factors if name.endswith(FIRST)]
    if not names or {*factors} != {name + end for name in names for end in (FIRST, SECOND)}:
        raise ValueError(f"adapter: {len(factors)} tensors; allowed: <layer>{FIRST} and <layer>{SECOND} of each layer")
    layers = {name: (factors[name + FIRST], factors[name + SECOND]) for name in names}
    for name, (first, second) in layers.items():
        shapes = (first.shape, second.shape)
        is_matrix = len(first.shape) == len(second.shape) == 2
        if (
            not is_matrix
            or {first.dtype, second.dtype} != {"F32"}
            or (first.shape[0], second.shape[1])
            != (
                record.rank,
                record.rank,
            )
        ):
            raise ValueError(f"adapter: factors of shapes {shapes} for {name!r}; allowed: F32, of rank {record.rank}")
    return layers


def _check_fits(
    layers: Mapping[str, tuple[TensorBlock, TensorBlock]], record: AdapterRecord, base: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise ValueError if a layer has no weight in version 0, or a weight of another shape."""
    for name, (first, second) in layers.items():
        shape = (second.shape[0], first.shape[1])
        expected = shape[::-1] if name in record.transposed else shape
        if base.get(name + WEIGHT) != expected:
            held = base.get(name + WEIGHT)
            raise ValueError(
                f"adapter: the weight of {name!r} in version 0 has shape {held}; its factors give {expected}"
            )
