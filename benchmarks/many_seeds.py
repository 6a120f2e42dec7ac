"""Plays the histories of many seeds in several processes, or shows one of them event by event.

What a history is, and which rules hold in it, is up to the caller.
"""

import argparse
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any, TypeVar

from benchmarks.reporting import Target, finish

CHUNK = 25


@dataclass(frozen=True)
class Verdict:
    """The results that every script keeps of a history.

    Attributes:
        seed: The history's.
        broken: The broken rules, each as "rule: what happened".
        counts: How often each event happened.
        lasted_s: Virtual seconds.
    """

    seed: int
    broken: tuple[str, ...]
    counts: Counter[str]
    lasted_s: float


Result = TypeVar("Result")
Judged = TypeVar("Judged", bound=Verdict)


def play(judge: Callable[[int], Result], seeds: Iterable[int]) -> list[Result]:
    """Simulate and check the histories of these seeds, in this process, without their warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)  # faults are intended here
    try:
        return [judge(seed) for seed in seeds]
    finally:
        logging.disable(before)


def play_in_processes(run_seeds: Callable[[range], list[Judged]], seeds: range, processes: int) -> list[Judged]:
    """Do the same in several processes; the result does not depend on their number."""
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        return [verdict for verdicts in pool.map(run_seeds, chunks) for verdict in verdicts]


def show(seed: int, events: Iterable[tuple[float, str, str]], broken: Sequence[str], counts: Counter[str]) -> bool:
    """Print the events of one history; returns whether every rule held."""
    for at_s, who, what in events:
        print(f"{at_s:10.3f}  {who:22}  {what}")
    print(f"seed {seed}: {len(broken)} rules broken; {dict(counts)}")
    return not broken


def tally(verdicts: Sequence[Verdict], command: str) -> tuple[Counter[str], Counter[str]]:
    """Print each history that broke a rule, with the command that replays it; returns all counts, and broken rules."""
    counts: Counter[str] = Counter()
    broken: Counter[str] = Counter()
    for verdict in verdicts:
        counts.update(verdict.counts)
        broken.update({rule.split(":", 1)[0] for rule in verdict.broken})
        if verdict.broken:
            print(f"seed {verdict.seed}: {verdict.broken[0]}")
            print(f"  replay: python -m benchmarks.{command} --seed {verdict.seed} --trace")
    return counts, broken


def finish_histories(
    command: str,
    rules: Mapping[str, str],
    verdicts: Sequence[Verdict],
    wall_s: float,
    processes: int,
    *,
    as_json: bool,
    results: Callable[[Counter[str]], dict[str, Any]],
) -> None:
    """Print the counts of events, and a target for each rule, which no history may break.

    command: the script's name. rules: what a broken rule means, by its name. results: what the script reports of the
    counts of events beside what every such script does.
    """
    counts, broken = tally(verdicts, command)
    histories = len(verdicts)
    finish(
        command,
        [{"what": name, "count": count, "per history": count / histories} for name, count in sorted(counts.items())],
        [Target(what, broken[rule], "== 0") for rule, what in rules.items()],
        as_json=as_json,
        notes={"seeds": f"{verdicts[0].seed}..{verdicts[-1].seed}", "processes": processes},
        results={
            "histories": histories,
            "failed_seeds": [verdict.seed for verdict in verdicts if verdict.broken],
            "wall_s": wall_s,
            "process_ms_per_history": 1000 * wall_s * processes / histories,
            "virtual_hours": sum(verdict.lasted_s for verdict in verdicts) / 3600,
            **results(counts),
        },
    )


def run_command(
    description: str | None,
    run_seeds: Callable[[range], list[Judged]],
    trace: Callable[[int], bool],
    report: Callable[[list[Judged], float, int, bool], None],
) -> None:
    """The command line: plays seeds and reports, or shows one; exits with 1 if the shown history breaks a rule."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--seeds", type=int, default=400, help="how many histories")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seed", type=int, help="only this one, in this process")
    parser.add_argument("--trace", action="store_true", help="with --seed: print every event")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.seed is not None and options.trace:
        raise SystemExit(0 if trace(options.seed) else 1)
    first, seeds = (options.first, options.seeds) if options.seed is None else (options.seed, 1)
    began_s = time.monotonic()
    verdicts = play_in_processes(run_seeds, range(first, first + seeds), options.processes)
    report(verdicts, time.monotonic() - began_s, options.processes, options.json)
