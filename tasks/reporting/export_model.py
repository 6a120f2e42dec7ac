"""Export: a weight version of a run as a Hugging Face model directory, for transformers, vLLM and other readers.

Owns which version it is, how tensors are divided into files, and that a directory appears whole or not at all. Every
tensor is verified before it is written. torch is needed to merge an adapter, and for nothing else.
"""

import json
import shutil
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import groupby
from math import prod
from pathlib import Path
from typing import Any

from resources.documents import parse_json
from resources.model_config import model_fields
from storage.clock import Clock
from storage.paths import expanded
from storage.records import layout, model_files
from storage.records.run import exists, next_iteration, read_plan
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.weights.adapters import BASE_VERSION, adapter_record
from storage.weights.manifest import PUBLISHED_AT_S, Manifest, TensorBlock, num_bytes
from storage.weights.objects import Described, encode_header, in_file_order
from storage.weights.stored_versions import list_versions
from storage.weights.tensor_sets import read_manifest
from tasks.learning.pretrained import stop_token_ids
from tasks.reporting.float_dtypes import converted
from tasks.sampling.session.pulled_model import pull_model

# Bytes of tensors in a file; with any header the file stays below 4 GiB.
SHARD_BYTES_MAX = 4_000_000_000
STORED = "stored"
DTYPES = {"bfloat16": "BF16", "float32": "F32", "float16": "F16"}
DTYPE_NAMES = {code: name for name, code in DTYPES.items()} | {"F64": "float64"}
CONFIG, INDEX, CARD = "config.json", "model.safetensors.index.json", "README.md"
GENERATION = "generation_config.json"
TIED_HEAD = "lm_head.weight"


@dataclass(frozen=True, kw_only=True)
class ExportedModel:
    """The written model.

    Attributes:
        path: The folder.
        version: The weight version.
        dtype: The dtype of most weights.
        tensors: How many tensors were written.
        num_bytes: The bytes of all tensors.
        files: How many files hold the tensors.
    """

    path: Path
    version: int
    dtype: str
    tensors: int
    num_bytes: int
    files: int


def export_model(
    store: ObjectStore,
    folder: Path,
    clock: Clock,
    *,
    version: int | None = None,
    dtype: str = STORED,
    shard_bytes_max: int = SHARD_BYTES_MAX,
) -> ExportedModel:
    """Write a weight version (default: the newest) as the model directory `folder`, which must be empty or missing.

    `dtype` converts the floating tensors; STORED leaves every bit as it is. A file holds at most `shard_bytes_max`
    bytes of tensors, or a single larger tensor. Takes the memory of the whole version. Raises LookupError if there is
    no run or no such version, listing those there are, FileExistsError, NotADirectoryError, ValueError for a folder
    that cannot be put in place or a dtype that cannot hold the values, and what reading raises. After an error nothing
    is left.
    """
    if dtype not in (STORED, *DTYPES):
        raise ValueError(f"dtype: value {dtype!r}; allowed: {', '.join((STORED, *DTYPES))}")
    chosen = choose_version(store, version)
    with appearing(folder) as unfinished:
        model_files.download(store, unfinished)
        config = _read_config(store, unfinished)
        manifest, tensors = _pull(store, chosen, clock)
        is_adapter = adapter_record(manifest, chosen) is not None
        stored = read_manifest(store, layout.weights(BASE_VERSION)) if is_adapter else manifest
        for name in _tied(config, stored):
            del tensors[name]
        described = {name: (_code(block.dtype, dtype), block.shape) for name, block in tensors.items()}
        usual = _usual_dtype(described)
        files = write_weights(unfinished, tensors, described, shard_bytes_max)
        write_json(unfinished / CONFIG, _with_dtype(_with_architecture(config), usual))
        _write_stop_tokens(store, unfinished)
        exported = ExportedModel(
            path=folder,
            version=chosen,
            dtype=usual,
            tensors=len(described),
            num_bytes=sum(num_bytes(*each) for each in described.values()),
            files=files,
        )
        card = model_card(exported, store.url, base_model(store), manifest, clock.wall())
        (unfinished / CARD).write_text(card, encoding="utf-8")
    return exported


@contextmanager
def appearing(folder: Path) -> Iterator[Path]:
    """A new folder to write to, which replaces `folder` when the block ends; if the block raises, nothing is left.

    Raises FileExistsError, NotADirectoryError or ValueError if `folder` is not empty or cannot be replaced.
    """
    target = _free_folder(folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f".{target.name}.{uuid.uuid4().hex}.unfinished")
    try:
        unfinished.mkdir()
        yield unfinished
        _put_in_place(unfinished, target)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def choose_version(
    store: ObjectStore, version: int | None, prefix: str = layout.WEIGHTS, noun: str = "weight version"
) -> int:
    """`version`, or the newest of those below `prefix`, called `noun`; raises LookupError, which lists them.

    The newest is never taken for one that the last committed iteration made, and that is missing.
    """
    if not exists(store, layout.RUN):
        raise LookupError(f"{store.url} holds no run")
    published = sorted(list_versions(store, prefix).complete)
    if not published:
        raise LookupError(f"{store.url} holds no {noun} yet")
    if version is None:
        due = next_iteration(store) if prefix == layout.WEIGHTS else 0
        if published[-1] < due:
            raise LookupError(
                f"version: {due} iterations are committed, and {noun} {due} is missing; allowed: {_ranges(published)}"
            )
        return published[-1]
    if version not in published:
        why = "was deleted by the run's retention" if 0 <= version < published[-1] else "is not published"
        if prefix == layout.CHECKPOINTS and version < published[-1]:
            why += ", or never stored (trainer.checkpoint_interval)"
        raise LookupError(f"version: {noun} {version} {why}; allowed: {_ranges(published)}")
    return version


def divide(sizes: Mapping[str, int], bytes_max: int) -> list[list[str]]:
    """The tensors' names for each file, in order: at most `bytes_max` bytes, or a single larger tensor."""
    groups: list[list[str]] = [[]]
    total = 0
    for name, size in sizes.items():
        if groups[-1] and total + size > bytes_max:
            groups.append([])
            total = 0
        groups[-1].append(name)
        total += size
    return groups


def model_card(exported: ExportedModel, run_url: str, base: str | None, manifest: Manifest, now_s: float) -> str:
    """The directory's README.md. `base` is the name of the pretrained model's directory, if known."""
    published_s = manifest.metadata.get(PUBLISHED_AT_S)
    rows = {
        "run": f"`{run_url}`",
        "weight version": f"{exported.version}, the policy after that many iterations",
        "base model": f"`{base}`" if base else None,
        "weights": f"{exported.dtype}, {exported.num_bytes} bytes",
        "published": day(published_s) if isinstance(published_s, int | float) else None,
        "exported": day(now_s),
    }
    return card("transformers", f"{base or 'A policy'}, weight version {exported.version}", rows)


def card(library: str, title: str, rows: Mapping[str, str | None]) -> str:
    """A README.md as model hubs read it: the library that opens the folder, a title, and a table of facts."""
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items() if value)
    return (
        f"---\nlibrary_name: {library}\npipeline_tag: text-generation\n---\n\n# {title}\n\n"
        f"From a run of Gleaner, reinforcement-learning post-training.\n\n| | |\n|---|---|\n{table}\n"
    )


def base_model(store: ObjectStore) -> str | None:
    """The name of the directory from which the run's first weights were read; None if unknown."""
    try:
        source = read_manifest(store, layout.weights(0)).metadata.get("source")
    except ObjectMissing:
        return None
    return source if isinstance(source, str) else None


def write_file(path: Path, tensors: dict[str, TensorBlock], described: Described) -> None:
    """Write a safetensors file with the tensors in `described`, in its dtypes, and remove them from `tensors`.

    Raises ValueError if a dtype cannot hold a tensor's values.
    """
    with path.open("wb") as file:
        file.write(encode_header(described))
        for name in in_file_order(described):
            file.write(_converted(name, tensors.pop(name), described[name][0]).data)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write `content` as indented JSON, for people and programs."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def day(at_s: float) -> str:
    """The day of a wall clock time, in UTC."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d")


def _free_folder(folder: Path) -> Path:
    """The path that `folder` leads to; raises if it is not empty, or cannot be replaced by a rename."""
    target = expanded(folder).resolve()
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{folder} is a file; allowed: a folder, which is made if it is missing")
    if target.exists() and any(target.iterdir()):
        raise FileExistsError(f"{folder} is not empty; allowed: an empty folder, or one that is made")
    if target == Path.cwd() or target.is_mount():
        raise ValueError(f"{folder} is a mount point or the working directory; allowed: a folder below it")
    return target


def _pull(store: ObjectStore, version: int, clock: Clock) -> tuple[Manifest, dict[str, TensorBlock]]:
    try:
        manifest, tensors = pull_model(store, version, None, clock)
        return manifest, dict(tensors)
    except ObjectMissing:
        choose_version(store, version)  # raises the clearer error if retention has deleted it meanwhile
        raise


def write_weights(
    folder: Path, tensors: dict[str, TensorBlock], described: Described, shard_bytes_max: int = SHARD_BYTES_MAX
) -> int:
    """Write the tensors, and an index for several files; returns the number of files. Frees what is written."""
    sizes = {name: num_bytes(*each) for name, each in described.items()}
    groups = divide(sizes, shard_bytes_max)
    places: dict[str, str] = {}
    for number, group in enumerate(groups, start=1):
        several = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        name = several if len(groups) > 1 else "model.safetensors"
        places |= dict.fromkeys(group, name)
        write_file(folder / name, tensors, {tensor: described[tensor] for tensor in group})
    if len(groups) > 1:
        write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": places})
    return len(groups)


def _converted(name: str, block: TensorBlock, code: str) -> TensorBlock:
    if block.dtype == code:
        return block
    found = converted(block, code)
    if found is None:
        raise ValueError(
            f"dtype: {DTYPE_NAMES[code]} does not hold the values of tensor {name!r}; allowed: a wider one"
        )
    return found


def _code(stored: str, dtype: str) -> str:
    """The dtype in which a tensor is written, as safetensors spells it."""
    return DTYPES[dtype] if dtype != STORED and stored in DTYPE_NAMES else stored


def _usual_dtype(described: Described) -> str:
    """The dtype of most elements among the floating tensors, as torch spells it."""
    elements: Counter[str] = Counter()
    for code, shape in described.values():
        if code in DTYPE_NAMES:
            elements[code] += prod(shape)
    if not elements:
        raise ValueError(f"no tensor of the dtypes {', '.join(DTYPE_NAMES.values())}; other weights cannot be exported")
    return DTYPE_NAMES[elements.most_common(1)[0][0]]


def _tied(config: Mapping[str, Any], manifest: Manifest) -> list[str]:
    """Return the name of the tied head, if the files hold the head beside the embedding; readers tie both again."""
    head = manifest.tensors.get(TIED_HEAD)
    if head is None or not config.get("tie_word_embeddings"):
        return []
    others = [entry for name, entry in manifest.tensors.items() if name != TIED_HEAD]
    same = any((each.dtype, each.shape, each.digest) == (head.dtype, head.shape, head.digest) for each in others)
    return [TIED_HEAD] if same else []


def _read_config(store: ObjectStore, folder: Path) -> dict[str, Any]:
    key = layout.model_file(CONFIG)
    try:
        config = parse_json((folder / CONFIG).read_bytes())
    except FileNotFoundError:
        raise LookupError(f"{store.url} holds no {key!r}, without which weights are no model") from None
    except ValueError as error:
        raise CorruptObject(key, f"not JSON: {error}") from None
    if not isinstance(config, dict):
        raise CorruptObject(key, "not a JSON object")
    return config


def _write_stop_tokens(store: ObjectStore, folder: Path) -> None:
    """Name the run's stop tokens in generation_config.json if the model's files lack some, for those that serve it."""
    if not exists(store, layout.plan(0)):
        return
    stops = read_plan(store, 0).sampling.stop_token_ids
    if not stops or set(stops) <= set(stop_token_ids(folder)):
        return
    file, config = folder / GENERATION, model_fields(folder)
    # Without the file, transformers takes these from config.json.
    taken = {name: config[name] for name in ("bos_token_id", "pad_token_id") if config.get(name) is not None}
    write_json(file, (model_fields(folder, GENERATION) if file.is_file() else taken) | {"eos_token_id": list(stops)})


def _with_architecture(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration with the model's class, which vLLM needs and a configuration saved without its model lacks."""
    if config.get("architectures"):
        return config
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - costs seconds
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    )

    architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.get("model_type"))
    return config | ({"architectures": [architecture]} if isinstance(architecture, str) else {})


def _with_dtype(config: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the configuration and its nested parts with `dtype`, also under the older name `torch_dtype`."""
    changed = {
        name: _with_dtype(part, dtype)
        if isinstance(part, dict) and name.endswith("_config") and {"dtype", "torch_dtype"} & part.keys()
        else part
        for name, part in config.items()
    }
    return changed | {"dtype": dtype, "torch_dtype": dtype}


def _put_in_place(unfinished: Path, target: Path) -> None:
    try:
        unfinished.rename(target)  # also replaces an empty folder
    except OSError as error:
        if not (target.is_dir() and any(target.iterdir())):
            raise
        raise FileExistsError(f"{target} was filled by another process meanwhile; nothing was written to it") from error


def _ranges(versions: Iterable[int]) -> str:
    """Ascending numbers as text, such as "0, 3, 7 to 9"."""
    ranges = []
    for _, group in groupby(enumerate(versions), lambda pair: pair[1] - pair[0]):
        run = [version for _, version in group]
        ranges.append(f"{run[0]} to {run[-1]}" if len(run) > 2 else ", ".join(map(str, run)))
    return ", ".join(ranges)
