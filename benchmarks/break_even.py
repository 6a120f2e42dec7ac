"""When token journals pay: costs measured on this machine, and the table that a formula computes from them.

The formula is tasks/planning/resume_value.py. GPU engines are assumed, and marked as such: their speeds are round
figures for such models, and their journalling cost per token is this machine's.
"""

import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.equal_work import GROUP_SIZE, PROMPT, decode, one_slot_plan, probe_model
from benchmarks.resume_value import EngineCosts, break_even_losses_per_h, resume_costs
from benchmarks.rollout import SAMPLING_RESPONSES, engine_for
from storage.assembly import JournalReader
from storage.claims import ClaimBook, take_over
from storage.journal import JournalWriter, PendingRows, ShardReader
from storage.local import LocalStore
from storage.noise_keys import noise_key
from storage.records import SamplingParams
from storage.shard import Finish
from storage.store import ObjectStore
from tasks.sampling.engines.engine import GenerationRequest

LENGTHS = (256, 1024, 4096, 8192, 16_384, 32_768)
LOSSES_PER_H = (0.01, 0.1, 0.61, 1.8, 4.0)
PROMPT_TOKENS = 26  # the median input of DeepSeek-R1's requests in ServeGen is 208, shared by a group of eight
WAVES = 4
FLUSH_INTERVAL_S = 5.0
SHARDS = 8
PREFIX = 512


def engines() -> dict[str, EngineCosts]:
    """The costs of this machine's engine as measured, and of two assumed GPU engines."""
    torch.set_num_threads(1)
    decode_per_s, prefill_per_s = engine_speeds()
    journal_s = statistics.median(journal_s_per_token() for _ in range(3))
    takeover = statistics.median(takeover_s() for _ in range(3))

    def costs(in_flight: int, decode_tokens_per_s: float, prefill: float, takeover: float) -> EngineCosts:
        return EngineCosts(
            responses_in_flight=in_flight,
            decode_tokens_per_s=decode_tokens_per_s,
            prefill_tokens_per_s=prefill,
            journal_share=journal_s * in_flight * decode_tokens_per_s,
            flush_interval_s=FLUSH_INTERVAL_S,
            takeover_s=takeover,
        )

    return {
        "measured CPU, 3.3M parameters": costs(SAMPLING_RESPONSES, decode_per_s, prefill_per_s, takeover),
        "assumed GPU, 8B": costs(64, 40.0, 10_000.0, 2.0),
        "assumed GPU, 32B": costs(32, 20.0, 3_000.0, 2.0),
    }


def engine_speeds() -> tuple[float, float]:
    """The tokens/s of one response while SAMPLING_RESPONSES are decoded together, and the tokens/s of prefill."""
    engine = engine_for(probe_model(512), SAMPLING_RESPONSES, len(PROMPT) + PREFIX + 64)
    decode(engine, SAMPLING_RESPONSES, 2)
    per_s = statistics.median(decode(engine, SAMPLING_RESPONSES, 64) for _ in range(3))
    sampling = SamplingParams(max_completion_length=PREFIX + 8)
    prefix = tuple(range(3, 3 + PREFIX // 2)) * 2
    requests = [
        GenerationRequest(index, index // GROUP_SIZE, PROMPT, prefix, noise_key(0, 0, index), sampling)
        for index in range(SAMPLING_RESPONSES)
    ]
    tokens, began_s = engine.prefill_tokens, time.perf_counter()
    engine.start(requests)
    return per_s / SAMPLING_RESPONSES, (engine.prefill_tokens - tokens) / (time.perf_counter() - began_s)


def journal_s_per_token(steps: int = 400) -> float:
    """The processor seconds of journalling one token: appending it, and its part of a shard every 200 steps."""
    with tempfile.TemporaryDirectory() as folder:
        writer = JournalWriter(LocalStore(Path(folder)), 0, "00000-0000000000000000", 0)
        writer.write(_tokens(0, 8))  # the first shard of a process also costs imports
        began_s = time.process_time()
        for start in range(8, 8 + steps, 200):
            writer.write(_tokens(start, 200))
        return (time.process_time() - began_s) / (steps * SAMPLING_RESPONSES)


def takeover_s() -> float:
    """Seconds to claim a dead worker's responses and read their prefixes, beginning with an empty reader."""
    plan = one_slot_plan(SAMPLING_RESPONSES // GROUP_SIZE, 2 * PREFIX)
    dead, successor = "00000-0000000000000000", "00000-1111111111111111"
    with tempfile.TemporaryDirectory() as folder:
        store: ObjectStore = LocalStore(Path(folder))
        book = ClaimBook(store, plan)
        take_over(store, plan, book, ShardReader(store, 0), unit=0, incarnation=dead, slot=0, predecessors=[])
        writer = JournalWriter(store, 0, dead, 0)
        for start in range(0, PREFIX, PREFIX // SHARDS):
            writer.write(_tokens(start, PREFIX // SHARDS))
        began_s = time.perf_counter()
        reader = JournalReader(store, plan)
        reader.refresh()
        shards = reader.shards
        take_over(store, plan, reader.book, shards, unit=0, incarnation=successor, slot=0, predecessors=[dead])
        found = [reader.assemble(response) for response in range(plan.num_responses)]
        duration_s = time.perf_counter() - began_s
    if any(len(response.token_ids) != PREFIX for response in found):
        raise RuntimeError("a taken-over response is not whole")
    return duration_s


def _tokens(start: int, steps: int) -> PendingRows:
    pending = PendingRows()
    for position in range(start, start + steps):
        for response in range(SAMPLING_RESPONSES):
            pending.append(response, 1, position, (7,), (-1.5,), Finish.RUNNING)
    return pending


def break_even_rows(costs: Mapping[str, EngineCosts]) -> list[dict[str, Any]]:
    """For each engine and length, the engine time that token journals save by loss rate, and the break-even rate.

    `saving %` is against a design that keeps finished responses. `overhead %` is each design's time beyond the useful
    work; "batch" keeps nothing until WAVES responses per place have ended.
    """
    rows = []
    for name, engine in costs.items():
        for length in LENGTHS:
            found = {
                rate: resume_costs(
                    engine, prompt_tokens=PROMPT_TOKENS, response_tokens=length, losses_per_h=rate, waves=WAVES
                )
                for rate in LOSSES_PER_H
            }
            rows.append(
                {
                    "engine": name,
                    "tokens": length,
                    "seconds": found[LOSSES_PER_H[0]].work_s,
                    "from losses/h": break_even_losses_per_h(
                        engine, prompt_tokens=PROMPT_TOKENS, response_tokens=length
                    ),
                    "saving %": {str(rate): 100 * each.saving for rate, each in found.items()},
                    "overhead %": {
                        str(rate): {
                            "batch": 100 * (each.whole_batch_s / each.work_s - 1),
                            "response": 100 * (each.whole_response_s / each.work_s - 1),
                            "token": 100 * (each.since_flush_s / each.work_s - 1),
                        }
                        for rate, each in found.items()
                    },
                }
            )
    return rows


def print_savings(rows: list[dict[str, Any]]) -> None:
    """Print the table of `saving %`; where it is negative, token journals do not pay."""
    print("engine time saved by token journals against keeping finished responses, % (negative: not worth it)")
    print(f"{'engine':32}{'tokens':>8}{'from losses/h':>16}" + "".join(f"{f'{rate}/h':>10}" for rate in LOSSES_PER_H))
    for row in rows:
        rate = "never" if row["from losses/h"] is None else f"{row['from losses/h']:.3g}"
        saved = "".join(f"{value:>10.2f}" for value in row["saving %"].values())
        print(f"{row['engine']:32}{row['tokens']:>8}{rate:>16}{saved}")
