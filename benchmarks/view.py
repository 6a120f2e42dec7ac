"""Claim: the page of a run with 100,000 responses in an iteration is there within 1 s, and filters them within 200 ms.

Run: python -m benchmarks.view --json. It writes a compacted iteration of so many responses, starts `gleaner view` as a
process, and opens the page in headless Chromium (playwright and chromium must be installed). First paint is what the
browser reports, since navigation. A filter takes from the input event to the second frame after it. The first
sort by a column is not in it, and is a row of its own.
"""

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.reporting import finish, measured
from storage.digests import digest_of
from storage.journal.response_parts import PART_TOKENS, ResponsesRecord, StoredPart, divide
from storage.journal.responses import Response, encode_responses
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.framing import trailer_digest
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import (
    BatchRecord,
    ClosedRecord,
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
from tasks.configuration.run_config import dump, parse
from tasks.planning.division import assign_groups
from tasks.reporting.metrics_lines import write_metrics

RESPONSES, GENERATIONS, SLOTS, BATCH_RESPONSES = 100_000, 8, 16, 1024
LENGTHS = (50, 451)
ROUNDS = 6
MIB = 1 << 20
SEED = 1
# Each sets inputs of the page by name; together they go over every response with every kind of test.
FILTERS: tuple[dict[str, str], ...] = (
    {"rewardMin": "0.5", "sort": "tokens"},
    {"prompt": "question 77", "sort": "reward"},
    {"lengthMin": "400", "slot": "3", "sort": "advantage"},
    {"sort": "tokens"},
)
_FILTER = """values => new Promise(done => {
  const filter = document.getElementById("filter").elements;
  for (const name of ["rewardMin", "prompt", "lengthMin", "slot"]) filter[name].value = values[name] ?? "";
  filter.sort.value = values.sort;
  const begun = performance.now();
  filter.sort.dispatchEvent(new Event("input", { bubbles: true }));
  requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now() - begun)));
})"""
_WATCH_ROWS = """new MutationObserver((_, observer) => {
  if (!document.querySelector("#responses tbody tr")) return;
  window.rowsAt = performance.now();
  observer.disconnect();
}).observe(document, { childList: true, subtree: true });"""


def write_run(store: ObjectStore, responses: int = RESPONSES) -> int:
    """Write a run with one committed and compacted iteration; returns how many tokens its responses have."""
    rng = np.random.default_rng(SEED)
    document = {
        "run": {"url": "memory://view", "num_generations": GENERATIONS},
        "policy": {"path": "models/none"},
        "data": {"source": "arithmetic"},
        "rewards": [{"function": "arithmetic"}],
    }
    config, groups = dump(parse(document)), responses // GENERATIONS
    run = RunRecord(config=config, digest="", vocab_size=1, model_files={}, created_at_s=time.time())
    records.commit(store, layout.RUN, run)
    prompts = encode_prompts([PromptRow(f"p{group}", (1,) * 50, f"question {group}", {}) for group in range(groups)])
    key = layout.prompts(0, digest_of(prompts))
    store.put(key, prompts)
    slots = tuple(
        SlotPlan(slot=slot, pool="rollout", groups=members) for slot, members in enumerate(assign_groups(groups, SLOTS))
    )
    plan = PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=SEED,
        num_generations=GENERATIONS,
        prompts_key=key,
        first_prompt=0,
        slots=slots,
        sampling=SamplingParams(max_completion_length=LENGTHS[1]),
        config=config,
        created_at_s=time.time(),
    )
    records.commit(store, layout.plan(0), plan)
    lengths, rewards = rng.integers(*LENGTHS, size=responses), rng.random(responses).round(3)
    graded = list(_graded(slots, lengths.tolist(), rewards.tolist()))
    for first in range(0, responses, BATCH_RESPONSES):
        batch = BatchRecord(
            iteration=0, number=first // BATCH_RESPONSES, responses=tuple(graded[first : first + BATCH_RESPONSES])
        )
        records.commit(store, layout.batch(0, batch.number), batch)
    records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="all recorded"))
    _write_parts(store, graded, rng)
    report = ReportRecord(
        iteration=0,
        weight_version=1,
        next_prompt=groups,
        metrics={"reward": float(rewards.mean()), "num_tokens": float(lengths.sum()), "timing_s/rollout": 100.0},
        rewards=tuple(rewards.tolist()),
        lengths=tuple(lengths.tolist()),
        lives=(),
        train_started_at_s=0.0,
        train_ended_at_s=0.0,
        created_at_s=time.time(),
    )
    records.commit(store, layout.report(0), report)
    write_metrics(store)
    return int(lengths.sum())


def _graded(slots: tuple[SlotPlan, ...], lengths: list[int], rewards: list[float]) -> Iterator[GradedResponse]:
    """Every response by number, ascending; each hundredth was resumed."""
    slot_of = {group: slot.slot for slot in slots for group in slot.groups}
    for number, (length, reward) in enumerate(zip(lengths, rewards, strict=True)):
        lives = "ab" if number % 100 == 0 else "a"
        spans = (
            Span(epoch=epoch, incarnation=f"{slot_of[number // GENERATIONS]:05d}-{life * 16}", last_sequence=9)
            for epoch, life in enumerate(lives, start=1)
        )
        yield GradedResponse(
            response=number,
            length=length,
            policy_length=length,
            finish_reason="length" if length == LENGTHS[1] - 1 else "stop",
            lineage=tuple(spans),
            reward=reward,
            rewards={"arithmetic": reward},
        )


def _write_parts(store: ObjectStore, graded: list[GradedResponse], rng: np.random.Generator) -> None:
    stored = []
    for part in divide({each.response: each.length for each in graded}, PART_TOKENS):
        body = encode_responses([_row(graded[number], rng) for number in part])
        store.put(layout.responses_part(0, part.start, part[-1]), body)
        stored.append(StoredPart(first=part.start, last=part[-1], digest=trailer_digest(body)))
    records.commit(store, layout.responses(0), ResponsesRecord(iteration=0, parts=tuple(stored)))


def _row(graded: GradedResponse, rng: np.random.Generator) -> Response:
    n = graded.length
    return Response(
        graded.response,
        graded.response // GENERATIONS,
        f"p{graded.response // GENERATIONS}",
        rng.integers(0, 50_000, size=n).astype(np.uint32),
        -rng.exponential(size=n).astype(np.float32),
        Finish.LENGTH if graded.finish_reason == "length" else Finish.STOP,
        graded.reward,
        graded.rewards,
        0,
        spans=(n,) if len(graded.lineage) == 1 else (n // 2, n - n // 2),
        origins=(n,),
        events=(),
    )


def look(url: str, rounds: int) -> dict[str, list[float]]:
    """Milliseconds by what was done, and the server's highest memory in MiB; a server and a browser per round."""
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 - not part of an installation

    found: dict[str, list[float]] = {}
    with sync_playwright() as driver:
        for _ in range(rounds):
            browser = driver.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
            server = subprocess.Popen(
                [sys.executable, "-m", "gleaner", "view", url, "--port", "0"], stdout=subprocess.PIPE, text=True
            )
            try:
                assert server.stdout is not None
                address = server.stdout.readline().split()[1]
                for name, value in measure_page(browser.new_page(), address).items():
                    found.setdefault(name, []).append(value)
                status = Path(f"/proc/{server.pid}/status").read_text(encoding="utf-8")
                [peak_kib] = re.findall(r"VmHWM:\s+(\d+)", status)
                found.setdefault("server MiB", []).append(int(peak_kib) * 1024 / MIB)
            finally:
                server.terminate()
                server.wait()
                browser.close()
    return found


def measure_page(page: Any, address: str) -> dict[str, float]:
    """Milliseconds of a new page (playwright's) that goes to the address."""
    page.set_default_timeout(120_000)
    page.add_init_script(_WATCH_ROWS)
    page.goto(address)
    page.wait_for_selector("#responses tbody tr")
    [paint] = page.evaluate("performance.getEntriesByName('first-contentful-paint').map(each => each.startTime)")
    # The advantages come last; they are not part of a filter's time.
    page.wait_for_selector("#responses tbody td:nth-child(4):not(:empty)")
    sorting = max(page.evaluate(_FILTER, {"sort": values["sort"]}) for values in FILTERS)
    slowest = max(page.evaluate(_FILTER, values) for values in FILTERS)
    begun = time.perf_counter()
    page.click("#responses tbody button")
    page.wait_for_selector("dialog[open] .stretch")
    return {
        "first paint": paint,
        "first rows": page.evaluate("window.rowsAt"),
        "slowest first sort": sorting,
        "slowest filter": slowest,
        "first response opened": 1000 * (time.perf_counter() - begun),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print a JSON object as the last line")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gleaner-view-") as folder:
        tokens = write_run(connect(folder))
        found = look(folder, options.rounds)
    rows = [{"what": name, "median": measured(values)} for name, values in found.items()]
    targets = [
        measured(found["first paint"]).target("first paint, ms", "< 1000"),
        measured(found["slowest filter"]).target("slowest filter, ms", "< 200"),
    ]
    notes = {"responses": RESPONSES, "tokens": tokens, "rounds": options.rounds}
    finish("view", rows, targets, as_json=options.json, notes=notes)


if __name__ == "__main__":
    main()
