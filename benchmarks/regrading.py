"""Claim: 100,000 stored responses are graded again in minutes, in the memory of one iteration, to equal values.

Run: python -m benchmarks.regrading --json. The run is written as a finished one stands after retention: iterations of
2,500 responses in parts, worked answers of 100 to 300 characters with a number at the end, half of them right, with the
rewards `math`, `format` and `length`. Each measurement is a process of its own, `regrade` and `compare` of all
iterations of a run; the runs differ in the number of iterations. The figure of memory is the highest resident memory of
that process.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from string import printable

import numpy as np

from benchmarks.reporting import Target, finish
from examples.warm_start import build_tokenizer
from storage.digests import digest_of
from storage.journal.response_parts import ResponsesRecord, StoredPart
from storage.journal.responses import Response, encode_responses
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.framing import trailer_digest
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import (
    BatchRecord,
    GradedResponse,
    PlanRecord,
    ReportRecord,
    RunRecord,
    SamplingParams,
    SlotPlan,
    Span,
)
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import RunConfig, dump, parse
from tasks.grading.in_process_rewards import length_penalty
from tasks.regrading.comparing import compare
from tasks.regrading.regrading import regrade

ITERATION_RESPONSES, GENERATIONS, BATCH_GROUPS = 2500, 10, 10
SIZES = (25_000, 100_000)
FREE_TOKENS, SCALE_TOKENS = 100, 400
INCARNATION = f"00000-{'a' * 16}"
MINUTES_MAX, GROWTH_MAX = 15, 1.2
NAME = "again"
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One process: seconds of both steps, responses whose reward changed, and its resident memory in MiB.

    Attributes:
        regrade_s: Seconds of grading.
        compare_s: Seconds of the comparison.
        changed: Responses whose reward is another than the recorded one.
        before_mib: Memory before the first step.
        peak_mib: The highest memory.
    """

    regrade_s: float
    compare_s: float
    changed: int
    before_mib: float
    peak_mib: float


def configuration(url: str) -> RunConfig:
    """The configuration of the written run."""
    limits = {"free_tokens": FREE_TOKENS, "scale_tokens": SCALE_TOKENS}
    return parse(
        {
            "run": {
                "url": url,
                "num_prompts_per_step": ITERATION_RESPONSES // GENERATIONS,
                "num_generations": GENERATIONS,
            },
            "policy": {"path": "written"},
            "data": {"source": "written.jsonl"},
            "rewards": [
                {"function": "math"},
                {"function": "format", "arguments": {"pattern": ".*Answer: [0-9]+"}, "weight": 0.2},
                {"function": "length", "arguments": limits, "weight": 0.1},
            ],
        }
    )


def write_run(url: str, responses: int) -> None:
    """A run of so many responses, as far as a grader looks at it."""
    store, config = connect(url), dump(configuration(url))
    tokenizer = build_tokenizer(printable)
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.save_pretrained(folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.suffix == ".json"}
    for name, body in files.items():
        store.put(layout.model_file(name), body)
    digests = {name: digest_of(body) for name, body in files.items()}
    records.commit(
        store, layout.RUN, RunRecord(config=config, digest="", vocab_size=128, model_files=digests, created_at_s=0.0)
    )
    ids = {character: tokenizer.convert_tokens_to_ids(character) for character in printable}
    for iteration in range(responses // ITERATION_RESPONSES):
        _write_iteration(store, iteration, config, ids)


def _write_iteration(store: ObjectStore, iteration: int, config: dict[str, object], ids: dict[str, int]) -> None:
    draw = random.Random(f"{SEED} {iteration}")
    groups = ITERATION_RESPONSES // GENERATIONS
    answers = [draw.randrange(10, 10_000) for _ in range(groups)]
    prompts = [PromptRow(f"p{group}", (1, 2), f"{answer}?", {"answer": answer}) for group, answer in enumerate(answers)]
    table = encode_prompts(prompts)
    key = layout.prompts(iteration, digest_of(table))
    store.put(key, table)
    plan = PlanRecord(
        iteration=iteration,
        weight_version=iteration,
        run_seed=SEED,
        num_generations=GENERATIONS,
        prompts_key=key,
        first_prompt=0,
        slots=(SlotPlan(slot=0, pool="rollout", groups=tuple(range(groups))),),
        sampling=SamplingParams(),
        config=config,
        created_at_s=0.0,
    )
    records.commit(store, layout.plan(iteration), plan)
    rows = [_response(plan, number, answers[number // GENERATIONS], draw, ids) for number in range(plan.num_responses)]
    body = encode_responses(rows)
    store.put(layout.responses_part(iteration, 0, len(rows) - 1), body)
    part = StoredPart(first=0, last=len(rows) - 1, digest=trailer_digest(body))
    records.commit(store, layout.responses(iteration), ResponsesRecord(iteration=iteration, parts=(part,)))
    size = BATCH_GROUPS * GENERATIONS
    for number, first in enumerate(range(0, len(rows), size)):
        graded = tuple(_graded(row) for row in rows[first : first + size])
        batch = BatchRecord(iteration=iteration, number=number, responses=graded)
        records.commit(store, layout.batch(iteration, number), batch)
    report = ReportRecord(
        iteration=iteration,
        weight_version=iteration + 1,
        next_prompt=0,
        metrics={},
        rewards=tuple(row.reward for row in rows if row.reward is not None),
        lengths=tuple(len(row.token_ids) for row in rows),
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=0.0,
        created_at_s=0.0,
    )
    records.commit(store, layout.report(iteration), report)


def _response(plan: PlanRecord, number: int, answer: int, draw: random.Random, ids: dict[str, int]) -> Response:
    is_right = draw.random() < 0.5
    text = "".join(draw.choices("abcdefgh +-=", k=draw.randrange(100, 300)))
    text += f"\nAnswer: {answer if is_right else answer + 1}"
    length = length_penalty(len(text), FREE_TOKENS, SCALE_TOKENS)
    values: dict[str, float | None] = {"math": float(is_right), "format": 1.0, "length": length}
    weights = {"math": 1.0, "format": 0.2, "length": 0.1}
    return Response(
        response=number,
        group=number // plan.num_generations,
        prompt_id=f"p{number // plan.num_generations}",
        token_ids=np.array([ids[character] for character in text], dtype=np.uint32),
        logprobs=np.full(len(text), -1.0, dtype=np.float32),
        finish=Finish.LENGTH,
        reward=sum((weights[name] * (value or 0.0) for name, value in values.items()), 0.0),
        rewards=values,
        weight_version=plan.weight_version,
        spans=(len(text),),
        origins=(len(text),),
        events=(),
    )


def _graded(row: Response) -> GradedResponse:
    return GradedResponse(
        response=row.response,
        length=len(row.token_ids),
        policy_length=len(row.token_ids),
        finish_reason="length",
        lineage=(Span(epoch=1, incarnation=INCARNATION, last_sequence=0),),
        reward=row.reward,
        rewards=row.rewards,
    )


def work(url: str) -> Measured:
    """Grade and compare all iterations, in this process."""
    store, config, before_mib, began_s = connect(url), configuration(url), _resident("VmRSS"), time.perf_counter()
    count = len([key for key in store.list(layout.ITERATIONS) if key.endswith("/report.json")])
    regrade(store, config, range(count), NAME)
    graded_s = time.perf_counter()
    change = compare(store, NAME, range(count))
    return Measured(
        regrade_s=graded_s - began_s,
        compare_s=time.perf_counter() - graded_s,
        changed=change.reward.changed or 0,
        before_mib=before_mib,
        peak_mib=_resident("VmHWM"),
    )


def measure(url: str) -> Measured:
    """The same in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.regrading", "--work-on", url]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def run(sizes: Sequence[int]) -> dict[int, Measured]:
    """The measurements by number of responses."""
    found = {}
    for size in sizes:
        with tempfile.TemporaryDirectory() as folder:
            write_run(folder, size)
            found[size] = measure(folder)
    return found


def _resident(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    [line] = [line for line in status.splitlines() if line.startswith(f"{field}:")]
    return int(line.split()[1]) / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", type=int, nargs=2, default=SIZES, metavar="RESPONSES")
    parser.add_argument("--work-on", help=argparse.SUPPRESS)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.work_on is not None:
        print(json.dumps(asdict(work(options.work_on))))
        return
    small, large = sorted(options.sizes)
    found = run((small, large))
    rows = [{"responses": size, **asdict(each)} for size, each in found.items()]
    last = found[large]
    minutes = (last.regrade_s + last.compare_s) / 60
    growth = last.peak_mib / found[small].peak_mib
    targets = [
        Target(f"minutes for {large:,} responses", minutes, f"<= {MINUTES_MAX}"),
        Target(f"highest memory for {large:,} over that for {small:,}", growth, f"<= {GROWTH_MAX}"),
        Target(
            "rewards that changed with equal functions", float(sum(each.changed for each in found.values())), "== 0"
        ),
    ]
    finish("regrading", rows, targets, as_json=options.json, notes={"iteration_responses": ITERATION_RESPONSES})


if __name__ == "__main__":
    main()
