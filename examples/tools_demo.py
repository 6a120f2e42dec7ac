"""`make demo-tools`: trains a tiny policy to use a tool, kills two slots in one iteration, repeats no answered call.

The demo makes the policy (a short supervised warm start, kept for the next time) and trains it by `pyflyte run`. In one
iteration it kills one slot while that decodes, and the other one inside a call of the tool that sleeps. All
trajectories of the iteration must be equal to those of an undisturbed rollout of the same plan, and the tool's own
ledger must show that no answered call was made again.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from examples.call_ledger import Audit, CallLedger, LedgerRow, audited
from examples.compare import undisturbed_equals
from examples.hidden_sums import LEDGER, dataset_rows
from examples.run_workflow import run_workflow, show_command
from examples.tools_warm_start import warm_start
from examples.warm_start import WarmStart
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_responses
from storage.journal.liveness import read_heartbeat
from storage.journal.responses import Response
from storage.journal.turns import TurnRecord, decode_turn
from storage.records import layout
from storage.records.crew_records import HeartbeatRecord
from storage.records.run import exists, next_iteration, read_plan, reports
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.preparing.local_training import ROOT
from tasks.viewing.run_status import table

CONFIG = ROOT / "examples" / "tools_demo.yaml"
ITERATIONS = 7
ITERATION_KILLED = 1
# Enough to know the form, and to leave something to learn.
WARM_START = WarmStart(steps=400, batch=32)
DECODING_SLOT, SLEEPING_SLOT = 1, 0
# The call ends by itself only if its member could not be killed in time.
SLEEP_S = 45.0
# With so few responses left, the slot that decodes is killed at any moment.
LEFT_MIN = 4
# Looks in a row: the slot that decodes could pass its point between two of them, while the other one sleeps at its own.
LOOKS, LOOK_INTERVAL_S = {DECODING_SLOT: 200, SLEEPING_SLOT: 1}, 0.002
PROBLEMS = 4096
console = Console(width=None if sys.stdout.isatty() else 120)


@dataclass
class Kills:
    """The two kills. interrupted: the call that slept; killed: the slots, with how each died."""

    store: ObjectStore
    ledger: CallLedger
    interrupted: str | None = None
    killed: dict[int, str] = field(default_factory=dict)
    ordered: bool = False
    _reader: JournalReader | None = None

    def attempt(self) -> None:
        """Kill what has come to the point at which it is to die."""
        if next_iteration(self.store) != ITERATION_KILLED or not exists(self.store, layout.plan(ITERATION_KILLED)):
            return
        if not self.ordered:
            response = read_plan(self.store, ITERATION_KILLED).responses_of(SLEEPING_SLOT)[0]
            self.ledger.order_sleep(ITERATION_KILLED, response, SLEEP_S)
            self.ordered = True
        for alive in self._alive():
            if alive.state == "working" and alive.slot not in self.killed and self._journals(alive):
                for _ in range(LOOKS[alive.slot]):
                    if self._killed(alive):
                        break
                    time.sleep(LOOK_INTERVAL_S)

    def _killed(self, alive: HeartbeatRecord) -> bool:
        """Kill the slot if it has come to its point."""
        # Stopped, so that nothing happens between the look and the kill.
        os.kill(alive.pid, signal.SIGSTOP)
        how = self._point_reached(alive.slot)
        os.kill(alive.pid, signal.SIGKILL if how else signal.SIGCONT)
        if how:
            self.killed[alive.slot] = how
            console.print(f"iteration {ITERATION_KILLED}: SIGKILL to slot {alive.slot} (process {alive.pid}), {how}")
        return bool(how)

    def _alive(self) -> list[HeartbeatRecord]:
        keys = self.store.list(layout.alive_all(ITERATION_KILLED))
        return [alive for key in keys if (alive := read_heartbeat(self.store, key)) is not None]

    def _journals(self, alive: HeartbeatRecord) -> bool:
        return exists(self.store, layout.shard(ITERATION_KILLED, alive.incarnation, 0))

    def _point_reached(self, slot: int) -> str:
        """What a slot does if it is at the point at which it is to die, else "".

        A kill makes those calls unknown whose turn is in the journal and whose answer is not. For the slot that decodes
        there are none, unless it is about to end; for the other one, it is the sleeping call alone.
        """
        plan = read_plan(self.store, ITERATION_KILLED)
        reader = self._reader = self._reader or JournalReader(self.store, plan)
        reader.refresh()
        mine = plan.responses_of(slot)
        left = [each for each in map(reader.assemble, mine) if not each.finish.ends_response]
        owing = [each.response for each in left if each.owes]
        if slot == DECODING_SLOT:
            return "decoding" if left and (not owing or len(left) <= LEFT_MIN) else ""
        asleep = [row for row in self.ledger.rows(ITERATION_KILLED) if row.response == mine[0] and not row.ended]
        if not asleep or owing != [mine[0]]:
            return ""
        self.interrupted = asleep[0].call_id
        return "inside a call"


def write_settings(path: Path, run: Path, model: Path, data: Path) -> None:
    """Write examples/tools_demo.yaml for this run, model and dataset."""
    settings: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
    settings["run"]["url"], settings["policy"]["path"], settings["data"]["source"] = str(run), str(model), str(data)
    path.write_text(yaml.safe_dump(settings, sort_keys=False))


def turns_of(responses: list[Response]) -> list[TurnRecord]:
    return [decode_turn(event) for response in responses for event in response.events]


def report(kills: Kills, rows: list[LedgerRow], kept: list[Response], same: int) -> bool:
    """Print the comparison and what the ledger says; whether all is as promised.

    kept: the responses of the iteration with kills. same: how many of them an undisturbed rollout has, too.
    """
    audit = audited(rows, turns_of(kept))
    console.print(_table(audit))
    console.print(
        f"iteration {ITERATION_KILLED}, {len(kills.killed)} slots killed: {same} of {len(kept)} trajectories equal to "
        "those of an undisturbed rollout"
    )
    if set(kills.killed) != {DECODING_SLOT, SLEEPING_SLOT} or kills.interrupted is None:
        console.print("not both slots could be killed in time; run the demo again")
        return False
    [slept] = [row for row in rows if row.call_id == kills.interrupted]
    console.print(
        f"the call in which a slot was killed: begun {slept.begun} times under one call_id, ended {slept.ended} times"
    )
    return same == len(kept) > 0 and audit.holds({kills.interrupted}) and (slept.begun, slept.ended) == (2, 1)


def _table(audit: Audit) -> Table:
    grid = Table("turns", "tool calls", "answered calls repeated", "unknown", "of these made again", "diverged")
    counts = (audit.calls, len(audit.repeated), len(audit.unknown), len(audit.again), audit.diverged)
    grid.add_row(str(audit.turns), *map(str, counts))
    return grid


def rewards_rose(store: ObjectStore) -> bool:
    """Print the table of iterations; whether the mean reward of the last three exceeds that of the first three."""
    history = reports(store)
    console.print(table(history))
    rewards = [item.metrics["reward"] for item in history]
    first, last = sum(rewards[:3]) / len(rewards[:3]), sum(rewards[-3:]) / len(rewards[-3:])
    console.print(f"mean reward: {first:.3f} in the first three iterations, {last:.3f} in the last three")
    return last > first


def make_inputs(model: Path, data: Path) -> None:
    """Make the warm-started policy and the dataset, unless an earlier demo has made them."""
    if not model.exists():
        with console.status("warm start") as shown:
            steps = WARM_START.steps
            warm_start(model, WARM_START, lambda step, _: shown.update(f"warm start: step {step} of {steps}"))
    rows = map(json.dumps, islice(dataset_rows(random.Random(11)), PROBLEMS))
    data.write_text("".join(f"{row}\n" for row in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a tiny policy to use a tool, and kill it on the way.")
    parser.add_argument("--iterations", type=int, default=ITERATIONS)
    parser.add_argument("--directory", type=Path, default=ROOT / "runs")
    arguments = parser.parse_args()
    started_s = time.monotonic()
    directory: Path = arguments.directory.resolve()
    directory.mkdir(parents=True, exist_ok=True)
    model, data = directory / "demo-tools-model", directory / "hidden_sums.jsonl"
    make_inputs(model, data)
    folder = Path(tempfile.mkdtemp(prefix=time.strftime("demo-tools-%Y%m%d-%H%M%S-"), dir=directory))
    run, config, ledger = folder / "run", folder / "run.yaml", folder / "ledger.sqlite"
    write_settings(config, run, model, data)
    kills = Kills(connect(str(run)), CallLedger(ledger))
    show_command(console, config, arguments.iterations)
    run_workflow(config, arguments.iterations, folder / "run.log", kills.attempt, {LEDGER: str(ledger)})
    rose = rewards_rose(kills.store)
    same, _, _ = undisturbed_equals(str(run), ITERATION_KILLED)
    kept = list(read_responses(kills.store, ITERATION_KILLED))
    passed = report(kills, kills.ledger.rows(ITERATION_KILLED), kept, same) and rose
    console.print(f"run directory: {run}\nledger: {ledger}")
    console.print(f"{'all good' if passed else 'NOT as promised'}, {time.monotonic() - started_s:.0f} s")
    sys.exit(not passed)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit(130)
