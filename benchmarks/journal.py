"""The cost of the journal: bytes per token against the entropy of its columns, speed, requests and processor time.

Run: python -m benchmarks.journal --json. The floor is the order-0 entropy of the token ids plus that of each of the
four bytes of the float32 log-probs, all estimated on the stored tokens themselves. It is a yardstick, not a bound: it
ignores repetition (text is stored below it) and relations of a log-prob's bytes to each other or to the token, and it
does not include the frequencies that a decoder would need.
"""

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.reporting import Measured, Target, finish, interleave, medians
from benchmarks.rollout import engine_for, journalling_tax_row
from examples.warm_start import build_model
from resources.prices import GET_USD, PUT_USD, machine_price
from storage.journal.assembly import JournalReader
from storage.journal.claims import take_over
from storage.journal.journal import JournalWriter, PendingRows
from storage.journal.noise_keys import noise_key
from storage.journal.responses import Response, decode_responses, encode_responses, split_planes
from storage.journal.shard import Finish, Logprobs, Row, TokenIds, encode_shard
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from storage.stores.local import LocalStore
from storage.stores.store import ObjectStore
from tasks.crew_model.flush_interval import GETS_PER_FLUSH, best_flush_interval_s, expected_usd_per_h, flush_usd
from tasks.sampling.engines.engine import GenerationRequest

VOCABULARY = 4096
LARGE_VOCABULARY = 150_000
IN_FLIGHT = 64
WORKER_TOKENS_PER_S = 5_000
FLUSH_INTERVALS_S = (1, 2, 5, 10)
HEARTBEAT_INTERVAL_S = 5.0
POLL_INTERVAL_S = 1.0
WORKERS = 64
LOSSES_PER_H = (0.02, 0.1, 0.5, 2.0)
MACHINES = ("g6.xlarge", "p4d.24xlarge", "p5.48xlarge")
GENERATIONS = 8


@dataclass(frozen=True)
class Sample:
    """The tokens of responses of equal length: uint32 ids and float32 log-probs, both [responses, length]."""

    name: str
    token_ids: TokenIds
    logprobs: Logprobs

    @property
    def tokens(self) -> int:
        return int(self.token_ids.size)

    def floor(self) -> tuple[float, float]:
        """The order-0 entropy in bytes per token, of the ids and of the log-probs' byte planes."""
        planes = split_planes(self.logprobs.reshape(-1))
        return entropy_bytes(self.token_ids), sum(entropy_bytes(plane) for plane in planes)


def entropy_bytes(values: np.ndarray[Any, Any]) -> float:
    """The order-0 entropy from the values' own frequencies, in bytes per value."""
    _, counts = np.unique(values, return_counts=True)
    shares = counts / counts.sum()
    return float(-(shares * np.log2(shares)).sum() / 8)


def sampled(responses: int, length: int) -> Sample:
    """Tokens sampled by TorchEngine from a random model whose head is sharpened to be as sure as a trained one's."""
    torch.manual_seed(0)
    shape = build_model(VOCABULARY, context_length=length + 8)
    shape.config.tie_word_embeddings = False  # with a tied head, a random model repeats every token
    model = type(shape)(shape.config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(24.0)
    engine = engine_for(model, responses, length + 8)
    sampling = SamplingParams(max_completion_length=length)
    engine.start([GenerationRequest(r, r, (1, r % 43), (), noise_key(0, 0, r), sampling) for r in range(responses)])
    ids = np.zeros((responses, length), dtype=np.uint32)
    logprobs = np.zeros((responses, length), dtype=np.float32)
    at = np.zeros(responses, dtype=np.int64)
    while deltas := engine.step():
        for delta in deltas:
            here = slice(at[delta.response], at[delta.response] + len(delta.token_ids))
            ids[delta.response, here], logprobs[delta.response, here] = delta.token_ids, delta.logprobs
            at[delta.response] = here.stop
    return Sample(f"TorchEngine, random model, vocabulary {VOCABULARY:,}", ids, logprobs)


def zipf(responses: int, length: int, *, ordered: bool) -> Sample:
    """Ids with probability 1 / rank, and log-probs of a stated mix: 55 % nearly certain, the others exponential.

    ordered: ids are ranks, as BPE ids nearly are; otherwise ranks are assigned to ids at random, zstd's worst case.
    """
    rng = np.random.default_rng(0)
    weights = np.cumsum(1 / np.arange(1, LARGE_VOCABULARY + 1))
    count = responses * length
    ranks = np.searchsorted(weights, rng.random(count) * weights[-1]).clip(max=LARGE_VOCABULARY - 1)
    names = np.arange(LARGE_VOCABULARY) if ordered else rng.permutation(LARGE_VOCABULARY)
    sure = rng.random(count) < 0.55
    logprobs = np.where(sure, -(10 ** rng.uniform(-7, -2, count)), -rng.exponential(0.9, count))
    order = "by frequency" if ordered else "at random"
    name = f"Zipf, vocabulary {LARGE_VOCABULARY:,}, ids {order}; stated log-probs"
    shape = (responses, length)
    return Sample(name, names[ranks].astype(np.uint32).reshape(shape), logprobs.astype(np.float32).reshape(shape))


def flushes(sample: Sample, interval_s: float) -> Iterator[list[Row]]:
    """The rows of one shard after another, as a member with 64 responses in flight would flush them."""
    responses, length = sample.token_ids.shape
    step = max(1, round(WORKER_TOKENS_PER_S * interval_s / IN_FLIGHT))
    for first in range(0, responses, IN_FLIGHT):
        for start in range(0, length, step):
            end = min(start + step, length)
            yield [
                Row(
                    response,
                    1,
                    start,
                    sample.token_ids[response, start:end],
                    sample.logprobs[response, start:end],
                    0,
                    Finish.LENGTH if end == length else Finish.RUNNING,
                )
                for response in range(first, min(first + IN_FLIGHT, responses))
            ]


def compacted_rows(sample: Sample) -> list[Response]:
    columns = zip(sample.token_ids, sample.logprobs, strict=True)
    return [
        Response(
            response=r,
            group=r // GENERATIONS,
            prompt_id=f"{r // GENERATIONS}",
            token_ids=ids,
            logprobs=lps,
            finish=Finish.LENGTH,
            reward=0.5,
            rewards={"exact": 0.5},
            weight_version=0,
            spans=(len(ids),),
            origins=(len(ids),),
            events=(),
        )
        for r, (ids, lps) in enumerate(columns)
    ]


def size_row(sample: Sample) -> dict[str, Any]:
    """The bytes per token in shards at every flush interval, and compacted, against the floor."""
    ids, logprobs = sample.floor()
    floor = ids + logprobs
    row: dict[str, Any] = {"measure": f"bytes/token: {sample.name}", "floor ids": ids, "floor log-probs": logprobs}
    for interval_s in FLUSH_INTERVALS_S:
        row[f"shards {interval_s} s"] = sum(len(encode_shard(r)) for r in flushes(sample, interval_s)) / sample.tokens
    row["compacted"] = len(encode_responses(compacted_rows(sample))) / sample.tokens
    return row | {"shards 5 s / floor": row["shards 5 s"] / floor, "compacted / floor": row["compacted"] / floor}


def write_journal(store: ObjectStore, sample: Sample, interval_s: float) -> PlanRecord:
    """Write the sample as the journal of an iteration, with one member per 64 responses."""
    responses, length = sample.token_ids.shape
    groups = range(responses // GENERATIONS)
    per_slot = IN_FLIGHT // GENERATIONS
    dealt = [tuple(groups[first : first + per_slot]) for first in range(0, len(groups), per_slot)]
    plan = PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=0,
        num_generations=GENERATIONS,
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(SlotPlan(slot=slot, pool="rollout", groups=own) for slot, own in enumerate(dealt)),
        sampling=SamplingParams(max_completion_length=length),
        config={},
        created_at_s=0.0,
    )
    reader = JournalReader(store, plan)
    names = [f"{slot:05d}-{slot:016x}" for slot in range(len(dealt))]
    for slot, name in enumerate(names):
        take_over(store, plan, reader.book, reader.shards, unit=slot, incarnation=name, slot=slot, predecessors=())
    writers = [JournalWriter(store, 0, name, 0) for name in names]
    for rows in flushes(sample, interval_s):
        writer, pending = writers[rows[0].response // IN_FLIGHT], PendingRows()
        for row in rows:
            pending.append(row.response, 1, row.start, row.token_ids.tolist(), row.logprobs.tolist(), row.finish)
        writer.write(pending)
    return plan


def speed_row(sample: Sample, rounds: int) -> dict[str, Any]:
    """Tokens per second of writing, reading and compacting a journal, in one thread except for reads of the store."""
    shards = list(flushes(sample, 5.0))
    rows = compacted_rows(sample)
    body = encode_responses(rows)

    def seconds(work: Callable[[], object]) -> Callable[[], float]:
        def arm() -> float:
            started_s = time.perf_counter()
            work()
            return time.perf_counter() - started_s

        return arm

    def assemble(store: ObjectStore, plan: PlanRecord) -> int:
        reader = JournalReader(store, plan)
        reader.refresh()
        return sum(len(reader.assemble(response).token_ids) for response in range(plan.num_responses))

    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder), fsync=False)
        plan = write_journal(store, sample, 5.0)
        if assemble(store, plan) != sample.tokens:
            raise RuntimeError("the journal does not hold what was written")
        arms = {
            "encode shards": seconds(lambda: [encode_shard(shard) for shard in shards]),
            "assemble": seconds(lambda: assemble(store, plan)),
            "encode compacted": seconds(lambda: encode_responses(rows)),
            "read compacted": seconds(lambda: decode_responses("benchmark", body)),
        }
        found = medians(interleave(arms, rounds))
    return {"measure": f"tokens/s: {sample.name}"} | {name: sample.tokens / took_s for name, took_s in found.items()}


def requests_row(interval_s: float) -> dict[str, Any]:
    """The requests per member-hour of the protocol (counted, not measured), in dollars and against a GPU's price.

    A shard is written once and read once by the trainer. At every look, the trainer also asks for the next shard and
    lists the claims of all members. A heartbeat is a PUT.
    """
    flush_count, beats, looks = (3600 / seconds for seconds in (interval_s, HEARTBEAT_INTERVAL_S, POLL_INTERVAL_S))
    puts, gets = flush_count + beats + looks / WORKERS, GETS_PER_FLUSH * flush_count + looks
    usd_per_h = puts * PUT_USD + gets * GET_USD
    mtok_per_h = WORKER_TOKENS_PER_S * 3600 / 1e6
    row: dict[str, Any] = {
        "measure": f"requests, flush every {interval_s:g} s",
        "PUT+LIST/Mtok": puts / mtok_per_h,
        "GET/Mtok": gets / mtok_per_h,
        "$/Mtok": usd_per_h / mtok_per_h,
    }
    return row | {f"/ spot GPU {name}": usd_per_h / gpu_usd_per_h(name) for name in MACHINES}


def gpu_usd_per_h(machine: str) -> float:
    return machine_price(machine).usd_per_gpu_h(interruptible=True)


def interval_row(losses_per_h: float) -> dict[str, Any]:
    """The best flush interval on each GPU, and the extra cost of 5 s, in per cent of the GPU's price."""
    row: dict[str, Any] = {"measure": f"best flush interval s, {losses_per_h:g} losses/h"}
    for machine in MACHINES:
        usd_per_h = gpu_usd_per_h(machine)
        cost = flush_usd(PUT_USD, GET_USD, stall_s=0.0, machine_usd_per_h=usd_per_h)
        best_s = best_flush_interval_s(cost, losses_per_h, usd_per_h)
        least, at_5_s = (expected_usd_per_h(s, cost, losses_per_h, usd_per_h) for s in (best_s, 5.0))
        row[machine] = best_s
        row[f"{machine}: 5 s costs more by %"] = 100 * (at_5_s - least) / usd_per_h
    return row


def targets(sizes: list[dict[str, Any]], requests: Mapping[float, dict[str, Any]], tax: Measured) -> list[Target]:
    """The claims, each with its worst value over the samples."""
    return [
        Target("compacted_over_floor", max(row["compacted / floor"] for row in sizes), "<= 1.15"),
        Target("shards_at_5_s_over_floor", max(row["shards 5 s / floor"] for row in sizes), "<= 1.15"),
        *(
            Target(f"requests_over_spot_gpu_at_5_s_{machine}", requests[5][f"/ spot GPU {machine}"], "<= 0.01")
            for machine in MACHINES
        ),
        tax.target("journalling_tax_percent_at_2_s", "< 1"),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--json", action="store_true", help="end with one JSON object")
    parser.add_argument("--full", action="store_true", help="more tokens and rounds: some minutes")
    options = parser.parse_args()
    torch.set_num_threads(1)
    shape = (1024, 4096) if options.full else (256, 2048)
    samples = [
        sampled(*((64, 4096) if options.full else (64, 800))),
        zipf(*shape, ordered=True),
        zipf(*shape, ordered=False),
    ]
    sizes = [size_row(sample) for sample in samples]
    speed = speed_row(samples[1], 5 if options.full else 3)
    requests = {interval_s: requests_row(interval_s) for interval_s in FLUSH_INTERVALS_S}
    intervals = [interval_row(losses_per_h) for losses_per_h in LOSSES_PER_H]
    journalled, tax = journalling_tax_row(400, 25 if options.full else 9, 2.0)
    finish(
        "journal",
        [*sizes, speed, *requests.values(), *intervals, journalled],
        targets(sizes, {float(key): row for key, row in requests.items()}, tax),
        as_json=options.json,
        notes={
            "tokens": [sample.tokens for sample in samples],
            "in_flight": IN_FLIGHT,
            "worker_tokens_per_s": WORKER_TOKENS_PER_S,
            "put_usd": PUT_USD,
            "get_usd": GET_USD,
            "workers": WORKERS,
        },
    )


if __name__ == "__main__":
    main()
