"""Claim: pulling weights costs hardly more than copying them, and an optimizer step sends few of their bytes.

There are five measurements: a verified pull against plain parallel copies of the same bytes, interleaved; the bytes of
versions after real optimizer steps in bfloat16; the time of a late joiner to its first token, part by part; bytes
and seconds of a version with LoRA adapters, merged and alone; and what the hand-over of a version to vLLM's processes
writes and reads.
"""

import argparse
import importlib
import os
import shutil
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.late_joiner import PARTS, joined
from benchmarks.reporting import Target, finish, interleave, medians, ratios
from benchmarks.weight_handover import measure_handover
from benchmarks.weight_steps import Step, make_policy, make_random_policy, steps
from storage.clock import SystemClock
from storage.records import layout, model_files
from storage.records.run import open_run
from storage.stores.connect import connect
from storage.stores.local import LocalStore
from storage.stores.store import ObjectStore
from storage.weights import deltas
from storage.weights.cache import WeightCache
from storage.weights.manifest import Manifest, TensorBlock
from storage.weights.objects import RANGE_BYTES, THREADS
from storage.weights.tensor_sets import publish, pull
from storage.weights.versions import publish_version, pull_version
from tasks.learning.pretrained import read_tensors, vocabulary_size

TENSOR_BYTES = 24 << 20
LEARNING_RATES = (1e-6, 3e-6, 1e-5)
CACHE_BYTES_MAX = 1 << 36
CHANGED_SHARE = 0.015  # for the codec's speed: about the share that a step with learning rate 1e-6 changes
BUCKET = "gleaner-benchmark"


def random_tensors(num_bytes: int, seed: int = 0) -> dict[str, TensorBlock]:
    """Incompressible bytes, in tensors of the size of a small model's layers."""
    rng = np.random.default_rng(seed)
    sizes = [min(TENSOR_BYTES, num_bytes - start) for start in range(0, num_bytes, TENSOR_BYTES)]
    return {f"{k}": TensorBlock("BF16", (size // 2,), rng.bytes(size)) for k, size in enumerate(sizes)}


def stepped(tensors: dict[str, TensorBlock], seed: int) -> dict[str, TensorBlock]:
    """Change tensors as a small step does: a few elements by one unit in the last place."""
    rng = np.random.default_rng(seed)
    new = {}
    for name, block in tensors.items():
        words = np.frombuffer(bytearray(block.data), np.uint16)
        changed = rng.random(len(words), dtype=np.float32) < CHANGED_SHARE
        words[changed] ^= 1  # up or down by one unit, and never to a NaN
        new[name] = TensorBlock(block.dtype, block.shape, words.data)
    return new


def copy_plainly(sizes: dict[str, int], fill: Callable[[str, int, memoryview], None]) -> None:
    """Copy ranges of all objects in parallel into buffers like those of a pull, without looking at the bytes."""
    buffers = {key: np.empty(size, np.uint8).data for key, size in sizes.items()}
    ranges = [(key, start) for key, size in sizes.items() for start in range(0, size, RANGE_BYTES)]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda part: fill(part[0], part[1], buffers[part[0]][part[1] : part[1] + RANGE_BYTES]), ranges))


def read_file(root: Path, key: str, start: int, view: memoryview) -> None:
    with (root / key).open("rb", buffering=0) as file:
        os.preadv(file.fileno(), [view], start)


def get_range(store: ObjectStore, key: str, start: int, view: memoryview) -> None:
    view[:] = store.get(key, start, start + len(view))


def timed(work: Callable[[], object]) -> float:
    started_s = time.perf_counter()
    work()
    return time.perf_counter() - started_s


def pull_times(
    store: ObjectStore, root: Path | None, num_bytes: int, folder: Path, rounds: int
) -> dict[str, list[float]]:
    """The seconds of each arm, round by round."""
    prefix = layout.weights(0)
    tensors = random_tensors(num_bytes)
    manifest = publish(store, prefix, tensors, {})
    sizes = {layout.tensor_object(prefix, name): entry.bytes for name, entry in manifest.objects.items()}
    arms: dict[str, Callable[[], float]] = {
        "copy by get": lambda: timed(lambda: copy_plainly(sizes, lambda *part: get_range(store, *part))),
        "pull": lambda: timed(lambda: pull(store, prefix)),
    }
    if root is not None:
        clock = SystemClock()
        (folder / "cache").mkdir()
        cache = WeightCache(folder / "cache", CACHE_BYTES_MAX)
        pull_version(store, 0, cache, clock)
        after = stepped(tensors, 1)
        publish_version(store, 1, after, {}, base=tensors, full_interval=10)
        arms |= {
            "plain copy": lambda: timed(lambda: copy_plainly(sizes, lambda *part: read_file(root, *part))),
            "pull, warm cache": lambda: timed(lambda: pull_version(store, 0, cache, clock)),
            "pull of the next version, warm cache": lambda: next_version(store, folder, clock),
        }
    for arm in arms.values():
        arm()
    return interleave(arms, rounds)


def rate_rows(where: str, plain: str, num_bytes: int, times_s: dict[str, list[float]]) -> list[dict[str, Any]]:
    """A row for each arm; `plain` names the arm that the others are compared with."""
    rates = {arm: num_bytes / seconds / 1e9 for arm, seconds in medians(times_s).items()}
    return [
        {"measured": where, "arm": arm, "GB/s": rate, "of the plain copy": rate / rates[plain]}
        for arm, rate in rates.items()
    ]


def next_version(store: ObjectStore, folder: Path, clock: SystemClock) -> float:
    """The seconds to pull version 1 on a machine that holds version 0, and to keep it there."""
    held = folder / "held"
    shutil.copytree(folder / "cache", held)
    seconds = timed(lambda: pull_version(store, 1, WeightCache(held, CACHE_BYTES_MAX), clock))
    shutil.rmtree(held)
    return seconds


@contextmanager
def s3_store() -> Iterator[ObjectStore | None]:
    """A bucket on moto's server in this process, which serves one request at a time; None if moto is not installed."""
    try:
        moto_server = importlib.import_module("tests.s3_server").moto_server
    except ImportError:
        yield None
        return
    with moto_server() as (endpoint, _):
        os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "x"}
        os.environ |= {"AWS_DEFAULT_REGION": "us-east-1", "AWS_EC2_METADATA_DISABLED": "true"}
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT")).close()  # noqa: S310 - ours
        yield connect(f"s3://{BUCKET}/run")


def measure_pull(num_bytes: int, s3_bytes: int, rounds: int) -> tuple[list[dict[str, Any]], list[Target]]:
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        store = LocalStore(folder / "run", fsync=False)
        local_s = pull_times(store, folder / "run", num_bytes, folder, rounds)
    rows = rate_rows("local directory", "plain copy", num_bytes, local_s)
    with s3_store() as remote, tempfile.TemporaryDirectory() as temporary:
        if remote is not None and s3_bytes:
            s3_s = pull_times(remote, None, s3_bytes, Path(temporary), rounds)
            rows += rate_rows("S3 server", "copy by get", s3_bytes, s3_s)
    return rows, [ratios(local_s["plain copy"], local_s["pull"]).target("pull_over_plain_copy", ">= 0.8")]


def sent_bytes(store: ObjectStore, version: int, manifest: Manifest) -> int:
    """The bytes that a reader with the version before has to read: manifest and objects."""
    return len(store.get(layout.manifest(layout.weights(version)))) + sum(o.bytes for o in manifest.objects.values())


def measure_steps(model: Path, counts: dict[float, int]) -> tuple[list[dict[str, Any]], list[Target], dict[str, Any]]:
    """Publish every step's weights as a run does, and compare bytes."""
    rows: list[dict[str, Any]] = []
    shares: dict[str, list[float]] = {}
    for rate, count in counts.items():
        with tempfile.TemporaryDirectory() as temporary:
            store = LocalStore(Path(temporary), fsync=False)
            shares[f"{rate:g}"] = []
            changed, rewards = [], []
            for number, step in enumerate(steps(model, rate, count)):
                if number == 0:
                    publish(store, layout.weights(0), step.before, {})
                manifest = publish_version(store, number + 1, step.after, {}, base=step.before, full_interval=10**6)
                shares[f"{rate:g}"].append(sum(o.bytes for o in manifest.objects.values()) / manifest.num_bytes)
                changed.append(changed_share(step))
                rewards.append(step.reward)
            sent = sent_bytes(store, count, manifest) / manifest.num_bytes
        rows.append(
            {
                "measured": f"steps at {rate:g}",
                "steps": count,
                "changed, first to last": f"{changed[0]:.2%} to {changed[-1]:.2%}",
                "delta / full, first to last": f"{shares[f'{rate:g}'][0]:.2%} to {shares[f'{rate:g}'][-1]:.2%}",
                "with the manifest, last": f"{sent:.2%}",
                "mean reward": statistics.fmean(rewards),
            }
        )
    first = shares[f"{LEARNING_RATES[0]:g}"]
    targets = [Target("delta_over_full_bytes_at_1e-6_largest", max(first), "<= 0.03")]
    return rows, targets, {"delta_over_full_bytes": shares}


def changed_share(step: Step) -> float:
    """The share of all elements that a step changed in bfloat16."""
    pairs = [
        (np.frombuffer(step.before[n].data, np.uint16), np.frombuffer(b.data, np.uint16)) for n, b in step.after.items()
    ]
    return sum(int((a != b).sum()) for a, b in pairs) / sum(len(b) for _, b in pairs)


def codec_rates(num_bytes: int) -> dict[str, Any]:
    """The codec's speed on one core, for normal weights of which CHANGED_SHARE changed."""
    rng = np.random.default_rng(0)
    normal = rng.normal(0, 0.02, num_bytes // 2).astype(np.float32)
    before = TensorBlock("BF16", (num_bytes // 2,), (normal.view(np.uint32) >> 16).astype(np.uint16).data)
    after = stepped({"w": before}, 1)["w"]
    delta = deltas.encode(before.data, after.data, 2)
    encode_s = statistics.median(timed(lambda: deltas.encode(before.data, after.data, 2)) for _ in range(3))
    data = bytearray(before.data)
    apply_s = statistics.median(timed(lambda: deltas.apply(delta, memoryview(data), 2)) for _ in range(3))
    return {
        "measured": "codec, one core",
        "changed, first to last": f"{CHANGED_SHARE:.2%}",
        "delta / full, first to last": f"{len(delta) / num_bytes:.2%}",
        "encode GB/s": num_bytes / encode_s / 1e9,
        "decode GB/s": num_bytes / apply_s / 1e9,
    }


def measure_join(hidden: int, layers: int, rounds: int, versions: int) -> list[dict[str, Any]]:
    """Processes that join at a version stored as differences, on a machine without weights and on one with weights."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        url = str(folder / "run")
        store = connect(url)
        model = make_random_policy(folder / "model", hidden=hidden, layers=layers)
        open_run(
            store,
            config={},
            digest="",
            vocab_size=vocabulary_size(model),
            model_files=model_files.upload(store, model),
            clock=SystemClock(),
            explain=lambda _: [],
        )
        tensors = read_tensors(model)
        publish(store, layout.weights(0), tensors, {})
        for version in range(1, versions + 1):
            base, tensors = tensors, stepped(tensors, version)
            publish_version(store, version, tensors, {}, base=base, full_interval=10**6)
        megabytes = sum(block.num_bytes for block in tensors.values()) / 1e6
        parts: dict[str, list[dict[str, float]]] = {"cold": [], "warm cache": []}
        for turn in range(rounds):
            parts["cold"].append(joined(url, versions, folder / f"cold-{turn}"))
            parts["warm cache"].append(joined(url, versions, folder / f"cold-{turn}"))
    return [
        {"measured": f"late joiner, {name}", "MB": megabytes}
        | {f"{part} s": statistics.median(each[part] for each in lives) for part in PARTS}
        | {"to the first token s": statistics.median(sum(each.values()) for each in lives)}
        for name, lives in parts.items()
    ]


def main() -> None:
    """Parse, run, report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--mib", type=int, default=256, help="weights on the local directory")
    parser.add_argument("--s3-mib", type=int, default=64, help="weights on the S3 server; 0 leaves it out")
    parser.add_argument("--rounds", type=int, default=5, help="of every arm of the pull")
    parser.add_argument("--steps", type=int, default=6, help="optimizer steps at the first learning rate; a half else")
    parser.add_argument("--warm-steps", type=int, default=150, help="supervised steps before them")
    parser.add_argument("--hidden", type=int, default=512, help="width of the late joiner's model")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--join-rounds", type=int, default=2)
    parser.add_argument("--only-handover", action="store_true", help="only the hand-over to vLLM's processes")
    given = parser.parse_args()
    handover_rows, handover_targets = measure_handover([16 << 20, 64 << 20, given.mib << 20], given.rounds)
    if given.only_handover:
        finish("weights", handover_rows, handover_targets, as_json=given.json, notes={"only_handover": True})
        return
    pull_rows, targets = measure_pull(given.mib << 20, given.s3_mib << 20, given.rounds)
    counts = {rate: given.steps if k == 0 else max(1, given.steps // 2) for k, rate in enumerate(LEARNING_RATES)}
    with tempfile.TemporaryDirectory() as temporary:
        model = make_policy(Path(temporary) / "model", given.warm_steps)
        step_rows, step_targets, results = measure_steps(model, counts)
    join_rows = measure_join(given.hidden, given.layers, given.join_rounds, versions=3)
    rows = [*pull_rows, *step_rows, codec_rates(min(given.mib, 64) << 20), *join_rows, *handover_rows]
    notes = {key: value for key, value in vars(given).items() if key != "json"}
    finish(
        "weights", rows, [*targets, *step_targets, *handover_targets], as_json=given.json, notes=notes, results=results
    )


if __name__ == "__main__":
    main()
