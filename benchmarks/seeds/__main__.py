"""The published results of RLBoost, StreamRL, RLHFless and PlexRL beside those of production's planner and order.

    python -m benchmarks.seeds [--json] [--full] [--seeds N] [--paper NAME] [--traces DIR]

Every setting is a file in scenarios/, with the source of each parameter. The knobs of each paper are named with the
figure that they were fitted on. All other figures are predictions, and those outside the common bound
(benchmarks/seeds/findings.py) are reported as missed; a figure that follows from others, and one that "no effect" would
meet, is marked. For every arm there is the share that it reaches of the work-conserving bound (work_bound.py). Four
settings of our own follow: all mechanisms together, a wide crew, tools for which responses wait, and an outage of all
spot machines. PlexRL is
different: its settings are in plexrl.py, because they are about a trainer and not about members, and its knobs were
chosen with all its figures in sight, so that none of them is a prediction.
"""

import argparse
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.reporting import finish
from benchmarks.seeds import outage, plexrl, rlboost, rlboost_sensitivity, rlhfless, streamrl, together, tools, wide
from benchmarks.seeds.arms import Arm, Outcomes, run_all
from benchmarks.seeds.findings import RATIO_OFF_MAX, SHARE_OFF_MAX, Finding, summary
from resources.spot_trace import PROCESSES

SEEDS, SEEDS_FULL = 3, 10


@dataclass(frozen=True, kw_only=True)
class Paper:
    """arms: the arms by name, on the traces of a folder or on a process; findings: from outcomes and seeds."""

    arms: Callable[[Path | None], dict[str, Arm]]
    findings: Callable[[Outcomes, Sequence[int]], list[Finding]]
    knobs: dict[str, str]


PAPERS = {
    rlboost.PAPER: Paper(
        arms=lambda traces: rlboost.arms(traces) | rlboost_sensitivity.arms(traces),
        findings=lambda got, _: [*rlboost.findings(got), *rlboost_sensitivity.findings(got)],
        knobs=rlboost.KNOBS,
    ),
    streamrl.PAPER: Paper(
        arms=lambda _: streamrl.arms(),
        findings=lambda got, _: streamrl.findings(got),
        knobs=streamrl.KNOBS,
    ),
    rlhfless.PAPER: Paper(arms=lambda _: rlhfless.arms(), findings=rlhfless.findings, knobs=rlhfless.KNOBS),
    # Its simulator is another, and has no arms.
    plexrl.PAPER: Paper(arms=lambda _: {}, findings=lambda _, seeds: plexrl.findings(seeds), knobs=plexrl.KNOBS),
    # It also runs RLBoost's arms, to compare with them.
    together.PAPER: Paper(
        arms=lambda traces: together.compared(traces) | together.arms(traces),
        findings=lambda got, _: together.findings(got),
        knobs={},
    ),
    wide.PAPER: Paper(arms=lambda _: wide.arms(), findings=lambda got, _: wide.findings(got), knobs={}),
    tools.PAPER: Paper(arms=lambda _: tools.arms(), findings=lambda got, _: tools.findings(got), knobs={}),
    outage.PAPER: Paper(arms=lambda _: outage.arms(), findings=lambda got, _: outage.findings(got), knobs={}),
}


def find(
    papers: Sequence[str], seeds: Sequence[int], workers: int, traces: Path | None, *, full: bool
) -> list[Finding]:
    """Simulate all arms of these papers and compare; arms that two papers share are run once."""
    arms: dict[str, dict[str, Arm]] = {name: PAPERS[name].arms(traces) for name in papers}
    together = {f"{paper}/{arm}": given for paper, of_paper in arms.items() for arm, given in of_paper.items()}
    run_once: dict[str, str] = {}
    for name, given in together.items():
        run_once[name] = next((other for other in run_once.values() if together[other] == given), name)
    got = run_all({name: together[name] for name in set(run_once.values())}, seeds, workers, full=full)
    found: list[Finding] = []
    for paper, of_paper in arms.items():
        chosen = Outcomes({arm: got.of(run_once[f"{paper}/{arm}"]) for arm in of_paper})
        found += PAPERS[paper].findings(chosen, seeds)
        found += bounds(paper, chosen, of_paper)
    return found


def bounds(paper: str, got: Outcomes, arms: Collection[str]) -> list[Finding]:
    """The share of the work-conserving bound that each arm reaches, and the greatest of all, which may not exceed 1."""
    found = [
        Finding(
            paper=paper,
            what=f"{arm}: share of the work-conserving bound",
            ours=got.median(arm, "reached"),
            comment=got.stalled(arm) or f"at least {got.median(arm, 'bound_s'):.0f} s an iteration",
        )
        for arm in arms
    ]
    most = max((outcome.reached for arm in arms for outcome in got.of(arm)), default=None)
    if most is not None:
        what = "greatest share of the work-conserving bound, of all arms and seeds"
        found.append(Finding(paper=paper, what=what, ours=most, most=1.0))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="the last line is a JSON object")
    parser.add_argument("--full", action="store_true", help=f"{SEEDS_FULL} seeds, for sensitivity as well")
    parser.add_argument("--seeds", type=int, help=f"instead of {SEEDS}, or {SEEDS_FULL} with --full")
    parser.add_argument("--paper", choices=PAPERS, action="append", help="only this one; may be given again")
    parser.add_argument(
        "--traces",
        type=Path,
        help="a folder with Bamboo's p3-trace.csv, instead of a process fitted to it; its other traces are held back",
    )
    parser.add_argument("--workers", type=int, default=2, help="processes; 0: this one")
    given = parser.parse_args(arguments)
    seeds = given.seeds if given.seeds is not None else SEEDS_FULL if given.full else SEEDS
    if seeds < 1 or given.workers < 0:
        parser.error(f"--seeds, --workers: value {seeds}, {given.workers}; allowed: at least 1, at least 0")
    if given.traces is not None and not (given.traces / "p3-trace.csv").is_file():
        parser.error(f"--traces: value {given.traces}; allowed: a folder with p3-trace.csv")
    papers = given.paper or list(PAPERS)
    found = find(papers, range(1, seeds + 1), given.workers, given.traces, full=given.full)
    targets = [target for finding in found if (target := finding.target()) is not None]
    finish(
        "seeds",
        [finding.row() for finding in found],
        targets,
        as_json=given.json,
        notes=_notes(papers, seeds, given.traces) | {"summary": summary(_of_papers(found))},
    )


def _of_papers(found: Sequence[Finding]) -> list[Finding]:
    """Those of papers of which every figure but those that are fitted is a prediction."""
    return [one for one in found if one.paper != plexrl.PAPER]


def _notes(papers: Sequence[str], seeds: int, traces: Path | None) -> dict[str, Any]:
    return {
        "seeds": seeds,
        "trace": PROCESSES["aws-p3"].source if traces is None else f"{traces}/p3-trace.csv",
        "knobs": {name: PAPERS[name].knobs for name in papers},
        "inside": f"within {RATIO_OFF_MAX:.0%} of a ratio, {SHARE_OFF_MAX} of a share",
        "marks": "[P] paper, [A] its abstract, [S] told by others, [D] derived; scenarios/ has all sources",
    }


if __name__ == "__main__":
    main()
