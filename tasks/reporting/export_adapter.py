"""Export: the LoRA adapter in a checkpoint of a run as a PEFT folder, for every tool that reads PEFT.

Owns the choice of the checkpoint, PEFT's names, and the description of the adapted model. Needs neither torch
nor peft. export_model decides how a folder appears and how files are written.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from storage.clock import Clock
from storage.records import layout
from storage.records.run import read_run
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.weights.tensor_sets import TensorBlock, pull, read_manifest
from tasks.configuration.deleted_fields import without_deleted
from tasks.configuration.lora import LoraConfig
from tasks.configuration.run_config import RunConfig, parse_held
from tasks.reporting.export_model import (
    CARD,
    appearing,
    base_model,
    card,
    choose_version,
    day,
    write_file,
    write_json,
)

ADAPTER_CONFIG, ADAPTER_WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PARAMETER = "parameter."  # prefix of the trained parameters in a checkpoint, which also holds the moments
FACTOR = re.compile(re.escape(PARAMETER) + r"(.+)\.lora_([AB])\.default\.weight")
WEIGHT = ".weight"
Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class ExportedAdapter:
    """The written adapter, in float32.

    Attributes:
        path: The folder.
        version: The weight version.
        rank: The rank of the factors.
        layers: How many layers have factors.
        num_bytes: The bytes of all factors.
    """

    path: Path
    version: int
    rank: int
    layers: int
    num_bytes: int


def export_adapter(store: ObjectStore, folder: Path, clock: Clock, *, version: int | None = None) -> ExportedAdapter:
    """Write the adapter in the checkpoint of a weight version (default: the newest) as the PEFT folder `folder`.

    The folder must be empty or missing; an interrupted export leaves no folder. The adapter on the run's pretrained
    model gives exactly the weight version. Raises LookupError, with the stored checkpoints, for a missing run or
    checkpoint; ValueError for a run without adapters, and as `fan_in_fan_out`; otherwise as `export_model`.
    """
    config, lora = _read_run(store)
    if version == 0:
        raise LookupError("version: weight version 0 is the pretrained model, without an adapter; allowed: 1 or more")
    chosen = _choose(store, version)
    with appearing(folder) as unfinished:
        tensors = _read_factors(store, chosen, lora)
        shapes = {name: block.shape for name, block in tensors.items()}
        base = {name: entry.shape for name, entry in read_manifest(store, layout.weights(0)).tensors.items()}
        layers = _layers(layout.manifest(layout.checkpoint(chosen)), shapes, base)
        settings = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": config.policy.path,
            "r": lora.rank,
            # vLLM declares this field as an integer.
            "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
            "target_modules": target_modules(lora, layers, base),
            "fan_in_fan_out": fan_in_fan_out(base, layers),
            "lora_dropout": 0.0,
            "bias": "none",
            "use_rslora": False,
            "use_dora": False,
            "inference_mode": True,
        }
        exported = ExportedAdapter(
            path=folder,
            version=chosen,
            rank=lora.rank,
            layers=len(layers),
            num_bytes=sum(block.num_bytes for block in tensors.values()),
        )
        write_file(
            unfinished / ADAPTER_WEIGHTS, tensors, {name: (block.dtype, block.shape) for name, block in tensors.items()}
        )
        write_json(unfinished / ADAPTER_CONFIG, settings)
        text = adapter_card(exported, store.url, base_model(store), lora, clock.wall())
        (unfinished / CARD).write_text(text, encoding="utf-8")
    return exported


def fan_in_fan_out(base: Shapes, layers: Mapping[str, tuple[int, int]]) -> bool:
    """Whether the adapted layers hold their weights as [inputs, outputs], as Conv1D of transformers does (GPT-2).

    `base`: shapes of the pretrained model's tensors. `layers`: (outputs, inputs) of the adapted layers. If both are
    equal, a layer without a bias does not, because all such layers have one. If it has a bias, other layers of the
    model decide, whose biases are as long as their outputs. Raises ValueError if nothing decides it, or it differs
    between layers.
    """
    found = {_is_transposed(base, layer, sizes) for layer, sizes in layers.items()} - {None}
    if len(found) == 2:
        raise ValueError(
            "fan_in_fan_out: some adapted layers hold their weights as [inputs, outputs], others as [outputs, inputs]; "
            "allowed: one of both, as an adapter states it once; --model exports the merged weights"
        )
    if not found:
        found = set(_transposed_by_bias(base))
    if len(found) != 1:
        raise ValueError(
            f"fan_in_fan_out: layers such as {min(layers)!r} are square, and nothing else tells whether they hold "
            "their weights transposed; allowed: models where it can be told; --model exports the merged weights"
        )
    return found == {True}


def target_modules(lora: LoraConfig, layers: Iterable[str], base: Iterable[str]) -> list[str]:
    """The endings of names that select exactly these `layers` of the model, or else the layers' names.

    `base`: the names of the pretrained model's tensors.
    """
    if lora.target_modules:
        return list(lora.target_modules)
    names = set(layers)
    ends = {_end(name) for name in names}
    chosen = {name.removesuffix(WEIGHT) for name in base if name.endswith(WEIGHT)}
    return sorted(ends if {name for name in chosen if _end(name) in ends} == names else names)


def adapter_card(exported: ExportedAdapter, run_url: str, base: str | None, lora: LoraConfig, now_s: float) -> str:
    """The folder's README.md. `base` is the name of the pretrained model's directory, if known."""
    size = f"{exported.layers} layers, {exported.num_bytes} bytes of float32"
    rows = {
        "run": f"`{run_url}`",
        "weight version": f"{exported.version}, the policy after that many iterations",
        "base model": f"`{base}`" if base else None,
        "adapter": f"LoRA of rank {lora.rank}, alpha {lora.alpha:g}, for {size}",
        "exported": day(now_s),
    }
    return card("peft", f"{base or 'A policy'}, adapter of weight version {exported.version}", rows)


def _read_run(store: ObjectStore) -> tuple[RunConfig, LoraConfig]:
    try:
        record = read_run(store)
    except ObjectMissing:
        raise LookupError(f"{store.url} holds no run") from None
    config = parse_held(without_deleted(record.config, to_read=True), "the configuration of the run")
    if config.lora is None:
        raise ValueError(
            f"lora: value null in the configuration of {store.url}, which trains the whole policy; allowed: a section "
            "lora; --model exports the policy"
        )
    return config, config.lora


def _choose(store: ObjectStore, version: int | None) -> int:
    return choose_version(store, version, layout.CHECKPOINTS, "checkpoint")


def _read_factors(store: ObjectStore, version: int, lora: LoraConfig) -> dict[str, TensorBlock]:
    """Both factors of every adapted layer, by PEFT's names."""
    prefix = layout.checkpoint(version)
    try:
        _, blocks = pull(store, prefix)
    except ObjectMissing:
        _choose(store, version)  # raises the clearer error if retention has deleted it meanwhile
        raise
    found: dict[str, TensorBlock] = {}
    for name, block in blocks.items():
        if not name.startswith(PARAMETER):
            continue
        factor = FACTOR.fullmatch(name)
        if factor is None or len(block.shape) != 2 or block.shape[factor[2] == "B"] != lora.rank:
            raise CorruptObject(
                layout.manifest(prefix),
                f"tensor {name!r} of shape {block.shape}; allowed: the two factors of layers, of rank {lora.rank}",
            )
        found[_factor_name(factor[1], factor[2])] = block
    return found


def _factor_name(layer: str, factor: str) -> str:
    return f"base_model.model.{layer}.lora_{factor}.weight"


def _layers(key: str, factors: Shapes, base: Shapes) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) of every adapted layer. Raises CorruptObject at `key` if factors do not fit the model."""
    names = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in factors}
    found = {}
    for layer in sorted(names):
        first, second = (factors.get(_factor_name(layer, factor)) for factor in "AB")
        weight = base.get(layer + WEIGHT)
        if first is None or second is None or weight is None or sorted(weight) != sorted((second[0], first[1])):
            raise CorruptObject(key, f"factors of shapes {first} and {second} for {layer!r}, whose weight is {weight}")
        found[layer] = (second[0], first[1])
    if not found:
        raise CorruptObject(key, "it holds no factors of an adapter")
    return found


def _is_transposed(base: Shapes, layer: str, sizes: tuple[int, int]) -> bool | None:
    """Whether the layer's weight is [inputs, outputs]; None if the layer alone does not tell."""
    outputs, inputs = sizes
    if outputs != inputs:
        return base[layer + WEIGHT] == (inputs, outputs)
    return None if f"{layer}.bias" in base else False


def _transposed_by_bias(base: Shapes) -> Iterable[bool]:
    """For every layer whose bias tells which dimension is its outputs, whether its weight is [inputs, outputs]."""
    for name, shape in base.items():
        bias: Any = base.get(f"{name.removesuffix(WEIGHT)}.bias")
        if name.endswith(WEIGHT) and bias and len(shape) == 2 and shape[0] != shape[1] and bias[0] in shape:
            yield shape[1] == bias[0]


def _end(name: str) -> str:
    return name.rpartition(".")[2]
