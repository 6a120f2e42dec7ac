"""Claim: concluding and compacting a wider iteration takes more time, and no more memory than for a part of it.

Run: python -m benchmarks.compaction --json. Each measurement is a process of its own that concludes and compacts an
iteration in a local directory, written as members write it: responses of 4,000 to 12,000 tokens, of which each member
decodes 64 at once, a shard every 5 s at 5,000 tokens per second. The arms: by parts, as it is, with parts of
PART_TOKENS tokens, which are smaller than production's so that both sizes have several; and all in one part, where
everything is in memory at once. The figure is the highest resident memory of the process.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from benchmarks.reporting import Target, finish
from storage.clock import SystemClock
from storage.digests import digest_of
from storage.journal.compaction import compact
from storage.journal.journal import ShardReader
from storage.journal.response_parts import PART_TOKENS as PRODUCTION_PART_TOKENS
from storage.journal.shard import Finish, Row, encode_shard
from storage.records import layout, records
from storage.records.crew_records import HeartbeatRecord
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import (
    BatchRecord,
    ClaimRecord,
    GradedResponse,
    PlanRecord,
    SamplingParams,
    SlotPlan,
    Span,
    TrainingRecord,
)
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import TensorBlock, publish
from tasks.planning.division import assign_groups
from tasks.reporting.conclusion import conclude_iteration

MILLION = 1_000_000
# Millions of tokens; as many journals as millions.
SIZES = (8, 32)
PART_TOKENS = 4 * MILLION
ARMS = ("by parts", "in one part")
# Only for the test that the measure can fail.
FORGETS_NOTHING = "forgets nothing"
GENERATIONS, IN_FLIGHT, VOCABULARY = 8, 64, 150_000
LENGTHS = (4000, 12_001)
ROW_TOKENS = 5 * 5000 // IN_FLIGHT
BATCH_RESPONSES = 64
WIDTH_TOKENS = 100_000 * 8000
GROWTH_MAX = 1.2
MIB = 1 << 20
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One process: seconds of both steps, and its resident memory in MiB, before them and at its highest."""

    conclude_s: float
    compact_s: float
    before_mib: float
    peak_mib: float


def write_iteration(store: ObjectStore, tokens: int, journals: int) -> int:
    """Write iteration 0 as far as training goes; returns its tokens, about as many as were asked for."""
    rng = np.random.default_rng(SEED)
    groups = max(journals, round(tokens / np.mean(LENGTHS) / GENERATIONS))
    prompts = encode_prompts([PromptRow(f"p{group}", (1,) * 100, "", {}) for group in range(groups)])
    key = layout.prompts(0, digest_of(prompts))
    store.put(key, prompts)
    plan = PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=SEED,
        num_generations=GENERATIONS,
        prompts_key=key,
        first_prompt=0,
        slots=tuple(
            SlotPlan(slot=slot, pool="rollout", groups=members)
            for slot, members in enumerate(assign_groups(groups, journals))
        ),
        sampling=SamplingParams(max_completion_length=LENGTHS[1]),
        config={},
        created_at_s=time.time(),
    )
    records.commit(store, layout.plan(0), plan)
    lengths = rng.integers(*LENGTHS, size=plan.num_responses)
    lineages: dict[int, Span] = {}
    for slot in plan.slots:
        lineages |= _write_journal(store, plan, slot.slot, lengths, rng)
    _write_batches(store, lengths, lineages)
    now_s = time.time()
    training = TrainingRecord(
        iteration=0, weight_version=1, metrics={}, reward_errors=(), started_at_s=now_s, ended_at_s=now_s
    )
    records.commit(store, layout.training(0), training)
    publish(store, layout.weights(1), {"w": TensorBlock("F32", (1,), bytes(4))}, {})
    return int(lengths.sum())


def _write_journal(
    store: ObjectStore,
    plan: PlanRecord,
    slot: int,
    lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]",
    rng: np.random.Generator,
) -> dict[int, Span]:
    """One member's claim, shards and last heartbeat; returns where its responses are."""
    name = f"{slot:05d}-{slot:016x}"
    claim = ClaimRecord(unit=slot, epoch=1, incarnation=name, slot=slot, responses=None, sealed={})
    records.commit(store, layout.claim(0, slot, 1), claim)
    waiting = list(reversed(plan.responses_of(slot)))
    running: dict[int, int] = {}
    ended: dict[int, Span] = {}
    sequence = decoded = 0
    while waiting or running:
        while waiting and len(running) < IN_FLIGHT:
            running[waiting.pop()] = 0
        rows = []
        for response, start in list(running.items()):
            count = min(ROW_TOKENS, int(lengths[response]) - start)
            is_last = start + count == lengths[response]
            ids = rng.integers(VOCABULARY, size=count, dtype=np.uint32)
            logprobs = rng.standard_normal(count, dtype=np.float32)
            finish = Finish.STOP if is_last else Finish.RUNNING
            rows.append(Row(response, 1, start, ids, logprobs, 0, finish))
            running[response] += count
            decoded += count
            if is_last:
                del running[response]
                ended[response] = Span(epoch=1, incarnation=name, last_sequence=sequence)
        store.create(layout.shard(0, name, sequence), encode_shard(rows))
        sequence += 1
    last = HeartbeatRecord(
        incarnation=name,
        slot=slot,
        state="gone",
        beat=1,
        pool="rollout",
        host=name,
        pid=1,
        started_at_s=plan.created_at_s,
        updated_at_s=time.time(),
        tokens_generated=decoded,
        tokens_recovered=0,
        prefill_tokens=0,
        responses_finished=len(ended),
        engine="none",
        batch_invariant=True,
    )
    records.put(store, layout.alive(0, name), last)
    return ended


def _write_batches(
    store: ObjectStore, lengths: "np.ndarray[tuple[int], np.dtype[np.int64]]", lineages: dict[int, Span]
) -> None:
    graded = [
        GradedResponse(
            response=response,
            length=int(length),
            policy_length=int(length),
            finish_reason="stop",
            lineage=(lineages[response],),
            reward=float(response % 2),
            rewards={"exact": float(response % 2)},
        )
        for response, length in enumerate(lengths)
    ]
    for number, first in enumerate(range(0, len(graded), BATCH_RESPONSES)):
        responses = tuple(graded[first : first + BATCH_RESPONSES])
        records.commit(store, layout.batch(0, number), BatchRecord(iteration=0, number=number, responses=responses))


def _resident(field: str) -> float:
    """A field of this process's memory in MiB: VmRSS now, VmHWM at its highest."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) * 1024 / MIB


def forget_nothing() -> None:
    """Make the reader of shards keep every row that it was asked for."""
    asked, rows = [], ShardReader.rows

    def noted(self: ShardReader, incarnation: str, epoch: int, response: int) -> list[tuple[int, Row]]:
        found = rows(self, incarnation, epoch, response)
        asked.append(found)
        return found

    ShardReader.rows = noted  # type: ignore[method-assign]


def work(url: str, part_tokens: int) -> Measured:
    """Conclude and compact, in this process."""
    store, before_mib, began_s = connect(url), _resident("VmRSS"), time.perf_counter()
    conclude_iteration(store, 0, {"rollout": 1.0, "train": 1.0}, SystemClock(), part_tokens=part_tokens)
    concluded_s = time.perf_counter()
    compact(store, 0, part_tokens)
    return Measured(
        conclude_s=concluded_s - began_s,
        compact_s=time.perf_counter() - concluded_s,
        before_mib=before_mib,
        peak_mib=_resident("VmHWM"),
    )


def measure(url: str, arm: str, part_tokens: int) -> Measured:
    """Conclude and compact in a process of its own, then leave the directory as it was."""
    command = [sys.executable, "-m", "benchmarks.compaction", "--work-on", url, "--arm", arm]
    command += ["--part-tokens", str(part_tokens)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    store = connect(url)
    for key in (layout.report(0), *store.list(layout.LENGTHS), *store.list(f"{layout.iteration(0)}responses")):
        store.delete(key)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def run(sizes: Sequence[int], part_tokens: int) -> tuple[list[dict[str, object]], dict[tuple[int, str], Measured]]:
    """The table and the measurements of all arms, by size in millions of tokens and arm."""
    rows, found = [], {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            tokens = write_iteration(connect(folder), size * MILLION, size)
            for arm in ARMS:
                of = found[size, arm] = measure(folder, arm, part_tokens)
                rows.append({"arm": arm, "tokens": tokens, "journals": size, **asdict(of)})
    return rows, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=2, default=SIZES, metavar="MILLIONS")
    parser.add_argument("--part-tokens", type=int, default=PART_TOKENS)
    parser.add_argument("--work-on", help=argparse.SUPPRESS)
    parser.add_argument("--arm", choices=(*ARMS, FORGETS_NOTHING), help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.work_on is not None:
        if options.arm == FORGETS_NOTHING:
            forget_nothing()
        print(json.dumps(asdict(work(options.work_on, 1 << 40 if options.arm == ARMS[1] else options.part_tokens))))
        return
    small, large = sorted(options.sizes)
    rows, found = run((small, large), options.part_tokens)
    first, last = found[small, ARMS[0]], found[large, ARMS[0]]
    what = f"highest memory at {large} million tokens over that at {small} million, by parts"
    target = Target(what, last.peak_mib / first.peak_mib, f"<= {GROWTH_MAX}")
    # Seconds per token at the larger size, on a local disk. If a member has f responses in flight and p in a part, the
    # shards are read about 2 + f / p times; p is 16 here, as for 260 members with production's parts.
    per_token_s = (last.conclude_s + last.compact_s) / (large * MILLION)
    notes = {
        "part_tokens": options.part_tokens,
        "parts_of_the_larger": math.ceil(large * MILLION / options.part_tokens),
    }
    extrapolated = {
        "extrapolated_minutes_for_800_million_tokens": per_token_s * WIDTH_TOKENS / 60,
        "production_part_tokens": PRODUCTION_PART_TOKENS,
    }
    finish("compaction", rows, [target], as_json=options.json, notes=notes, results=extrapolated)


if __name__ == "__main__":
    main()
