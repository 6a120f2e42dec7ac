"""Claim: of a run with a trainer of ours the code changes no bit since a commit, and takes no more processor time.

The same small run (a random policy, made once; two slots that decode one response at a time) is trained by the workflow
of each side's own code, in turns, in processes that have nothing else on their module path. Compared, by placement of
the trainer, are prompts, tokens, log-probs at sampling, rewards, batches, weights, the optimizer's state and the
metrics that depend on no clock, all to the last bit, and the kinds and fields of the objects in the run's directory. A
field that only the working tree writes is listed, and misses no target.

Processor time is that of all processes, user and system; a session's start is counted apart. How often a waiting
process looks at the store depends on the load of the machine, in both arms.
"""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from transformers.utils import logging as transformers_logging

from benchmarks.code_tree import Session, copy_commit, copy_working_tree, kill_descendants, processor_s, reap_orphans
from benchmarks.recorded_run import Recorded, differences, read_recorded
from benchmarks.reporting import Target, finish, interleave, measured, ratios
from resources.process import adopt_orphans

AGAINST, NOW = "against", "now"
PLACEMENTS = ("own", "pod", "shared")
STANDING = "standing"
START = "start and end"
RATIO_MAX = 1.10
SHOWN = 12


def settings(url: Path, model: Path, placement: str) -> dict[str, Any]:
    """A configuration for all commits with this placement; one response in flight makes log-probs equal to the bit."""
    trainer = {"placement": placement, "dtype": "float32", "group_timeout_s": 300.0, "micro_batch_tokens_max": 512}
    if placement == "shared":
        trainer["fleet"] = str(url.with_name("fleet"))
    return {
        "run": {"url": str(url), "seed": 7, "num_prompts_per_step": 6, "num_generations": 4},
        "policy": {"path": str(model)},
        "data": {"source": "arithmetic", "limit": 256},
        "rewards": [{"function": "examples.even_share:even_share"}],
        "sampling": {"max_completion_length": 24},
        "rollout": {
            "engine": "torch",
            "dtype": "float32",
            "context_length": 128,
            "max_responses_in_flight": 1,
            "flush_interval_s": 0.2,
            "idle_timeout_s": 0.0,
        },
        "algorithm": {"micro_batch_order": "plan"},
        "optimizer": {"learning_rate": 1e-3},
        "trainer": trainer,
        "planning": {"seeding": "off"},
        "retention": {"keep_weights": 1000, "keep_checkpoints": 1000},
        "pools": {"rollout": {"count": 2, "cpu": "1", "memory": "2Gi"}, "train": {"cpu": "1", "memory": "2Gi"}},
    }


def make_model(folder: Path) -> Path:
    """A random policy as small as the demo's."""
    import torch  # noqa: PLC0415 - the sessions' processes import their own

    from examples.warm_start import build_model, build_tokenizer  # noqa: PLC0415

    torch.manual_seed(1)
    tokenizer = build_tokenizer()
    transformers_logging.disable_progress_bar()
    build_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@dataclass
class Comparison:
    """Runs by the code of both trees. took_s and recorded: by placement (or START) and arm, in the order of rounds."""

    trees: Mapping[str, Path]
    folder: Path
    placements: Sequence[str]
    iterations: int
    took_s: dict[str, dict[str, list[float]]] = field(default_factory=dict)
    recorded: dict[str, dict[str, list[Recorded]]] = field(default_factory=dict)

    def run(self, rounds: int) -> None:
        """Let each tree train all placements in each round, in turns."""
        self._model = make_model(self.folder / "model")
        interleave({arm: partial(self._session, arm) for arm in self.trees}, rounds)

    def _session(self, arm: str) -> float:
        place = Path(tempfile.mkdtemp(prefix=f"{arm}-", dir=self.folder))
        documents = {each: settings(place / each / "run", self._model, each) for each in self.placements}
        began_s, took_s = processor_s(), dict[str, float]()
        with Session(self.trees[arm], place / "log") as session:
            for placement, document in documents.items():
                (place / placement).mkdir()
                before_s = processor_s()
                session.train(document, self.iterations)
                took_s[placement] = processor_s() - before_s
        reap_orphans()
        all_s = processor_s() - began_s
        took_s[START] = all_s - sum(took_s.values())
        print(f"{arm}, processor s: " + ", ".join(f"{part} {taken:.1f}" for part, taken in took_s.items()), flush=True)
        for part, taken in took_s.items():
            self._keep(self.took_s, part, arm, taken)
        # A standing trainer writes its last record when the session ends.
        for placement, document in documents.items():
            found = read_recorded(document["run"]["url"], self.iterations, document["trainer"].get("fleet"))
            self._keep(self.recorded, placement, arm, found)
        return all_s

    @staticmethod
    def _keep(found: dict[str, dict[str, list[Any]]], part: str, arm: str, value: Any) -> None:
        found.setdefault(part, {}).setdefault(arm, []).append(value)

    def differing(self, placement: str) -> dict[str, list[str]]:
        """By aspect, the places where the arms differ in any round."""
        pairs = zip(self.recorded[placement][AGAINST], self.recorded[placement][NOW], strict=True)
        return _joined(differences(before, after) for before, after in pairs)

    def scattering(self, placement: str) -> int:
        """The number of places where rounds of one tree differ."""
        return sum(
            len(places)
            for rounds in self.recorded[placement].values()
            for places in _joined(differences(rounds[0], other) for other in rounds[1:]).values()
        )

    def gone_and_new(self, placement: str, what: str) -> tuple[list[str], list[str]]:
        """Objects or fields that no round of the working tree has, and those that no round of the commit has."""
        before, after = (
            frozenset().union(*(getattr(each, what) for each in self.recorded[placement][arm]))
            for arm in (AGAINST, NOW)
        )
        return sorted(before - after), sorted(after - before)


def _joined(found: Iterable[Mapping[str, list[str]]]) -> dict[str, list[str]]:
    joined: dict[str, set[str]] = {}
    for each in found:
        for aspect, places in each.items():
            joined.setdefault(aspect, set()).update(places)
    return {aspect: sorted(places) for aspect, places in joined.items()}


def report(comparison: Comparison, notes: Mapping[str, Any], *, as_json: bool) -> None:
    """Print what differs, table, targets and JSON."""
    rows, targets, details = [], list[Target](), dict[str, dict[str, Any]]()
    for placement in comparison.placements:
        differing = {aspect: places for aspect, places in comparison.differing(placement).items() if places}
        objects_gone, objects_new = comparison.gone_and_new(placement, "objects")
        fields_gone, fields_new = comparison.gone_and_new(placement, "fields")
        details[placement] = {
            "differ": {aspect: places[:SHOWN] for aspect, places in differing.items()},
            "objects_gone": objects_gone,
            "objects_new": objects_new,
            "fields_gone": fields_gone,
            "fields_new": fields_new,
        }
        for what, found in details[placement].items():
            if found:
                print(f"{placement}, {what}: {found}")
        differ = sum(map(len, differing.values()))
        rows.append(_row(comparison, placement, differ))
        targets += [
            Target(f"{placement}_facts_that_differ", differ, "== 0"),
            Target(f"{placement}_kinds_of_objects_that_differ", len(objects_gone) + len(objects_new), "== 0"),
            Target(f"{placement}_fields_gone", len(fields_gone), "== 0"),
        ]
    parts = comparison.took_s.values()
    sums = {arm: list(map(sum, zip(*(part[arm] for part in parts), strict=True))) for arm in (AGAINST, NOW)}
    for name, seconds in ((START, comparison.took_s[START]), ("all", sums)):
        rows.append({"placement": name} | _times(seconds))
    targets.append(ratios(sums[NOW], sums[AGAINST]).target("processor_time_ratio", f"<= {RATIO_MAX}"))
    finish("unchanged", rows, targets, as_json=as_json, notes=notes, results={"placements": details})


def _row(comparison: Comparison, placement: str, differ: int) -> dict[str, Any]:
    rounds = comparison.recorded[placement]
    stored = {
        name: ratios(*([getattr(each, name) for each in rounds[arm]] for arm in (NOW, AGAINST)))
        for name in ("requests", "stored_bytes")
    }
    return {
        "placement": placement,
        "facts": sum(map(len, rounds[AGAINST][0].facts.values())),
        "differ": differ,
        "between rounds": comparison.scattering(placement),
        **_times(comparison.took_s[placement]),
        "requests, ratio": stored["requests"],
        "bytes, ratio": stored["stored_bytes"],
    }


def _times(seconds: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    ratio = ratios(seconds[NOW], seconds[AGAINST])
    return {"processor s": measured(seconds[NOW]), "ratio": ratio}


def main() -> None:
    """Parse, train, report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--against", default="HEAD", metavar="COMMIT", help="the working tree is compared with it")
    parser.add_argument("--placements", nargs="+", choices=(*PLACEMENTS, STANDING), default=PLACEMENTS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.rounds < 1 or given.iterations < 1:
        parser.error(f"--rounds, --iterations: value {given.rounds}, {given.iterations}; allowed: at least 1")
    # As Ctrl-C does: sessions and folders end with the program.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    adopt_orphans()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            trees = {AGAINST: copy_commit(given.against, folder / "against"), NOW: copy_working_tree(folder / "now")}
        except LookupError as error:
            parser.error(str(error))
        comparison = Comparison(trees, folder, given.placements, given.iterations)
        try:
            comparison.run(given.rounds)
        finally:
            kill_descendants(os.getpid())
    report(comparison, {key: getattr(given, key) for key in ("against", "rounds", "iterations")}, as_json=given.json)


if __name__ == "__main__":
    main()
