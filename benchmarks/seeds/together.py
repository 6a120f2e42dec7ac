"""All mechanisms together, added one after another, in RLBoost's setting for 14B: more than any one paper reports.

Nothing here is fitted or published. Every step keeps the mechanisms of the one before; comments say what does not add
up.
"""

from pathlib import Path

from benchmarks.seeds import rlboost
from benchmarks.seeds.arms import Arm, Outcomes, with_policy
from benchmarks.seeds.findings import Finding
from benchmarks.seeds.rlboost import MODELS, SEGMENT_S, fixed, on_trace
from tasks.forecasting.scenario import Scenario

PAPER = "together"
RECALL = 0.87
STATIC = (2, 4, 6, 8, 12)
BASE = "14B colocated"
STEPS = (
    ("spot, migration, balancing", "without seeding, groups in turn"),
    ("seeding", "RLBoost"),
    ("dispatch", f"by length, recall {RECALL} (StreamRL)"),
    ("cost width", "of 16 machines, cost_weight 0.3 (RLHFless, RLBoost's N_prem)"),
    ("cut", "least machine time, tau 0.7 (RLHFless); its machines stay paid for"),
    ("one step off", "StreamRL's asynchronous pipeline"),
)

# Without what does not add up: machines that a cut frees stay paid for. The width's cost_weight.
WITHOUT = {
    f"one step off and width by {of}, without dispatch and cut": weight for of, weight in (("time", 0.0), ("cost", 0.3))
}
FIGURES = (("tokens_per_s", "throughput"), ("tokens_per_usd", "tokens per dollar"))


def arms(traces: Path | None) -> dict[str, Arm]:
    """The steps, each on top of those before, and static choices of the same machines without a planner."""
    given = on_trace(MODELS["14B"].scenario, traces)
    crew = fixed(given, MODELS["14B"].instances)
    spot = with_policy(crew, planning={"seeding": "off", "dispatch": "in_turn"})
    seeded = with_policy(spot, planning={"seeding": "auto"})
    dispatched = with_policy(seeded, planning={"dispatch": "auto"}, predictor="recall", recall=RECALL)
    weighed = with_policy(fixed(dispatched, given.pools[0].count), planning={"width": "cost", "cost_weight": 0.3})
    cut = with_policy(weighed, planning={"objective": "gpu_seconds", "cut_share": 0.7})
    late = with_policy(cut, max_staleness=1)
    steps = zip(STEPS, (spot, seeded, dispatched, weighed, cut, late), strict=True)
    found = {f"together {name}": _arm(changed) for (name, _), changed in steps}
    for name, weight in WITHOUT.items():
        chosen = with_policy(fixed(seeded, given.pools[0].count), planning={"width": "cost", "cost_weight": weight})
        found[f"together {name}"] = _arm(with_policy(chosen, max_staleness=1))
    # A standing crew is of fixed size, and its machines stay.
    for instances in STATIC:
        standing = with_policy(fixed(seeded, instances), crew="standing", max_staleness=1)
        found[f"standing with flow, {instances}"] = _arm(standing)
        static = with_policy(fixed(spot, instances), max_staleness=1)
        found[f"one step off, static {instances}"] = _arm(static)
        found[f"one step off, static {instances}, seeding"] = _arm(with_policy(static, planning={"seeding": "auto"}))
    return found


def compared(traces: Path | None) -> dict[str, Arm]:
    """RLBoost's arms for the same machines."""
    return {n: arm for n, arm in rlboost.arms(traces).items() if n == BASE or n.startswith("static")}


def _arm(given: Scenario) -> Arm:
    return Arm(scenario=given, span_s=SEGMENT_S, settle=2)


def findings(got: Outcomes) -> list[Finding]:
    """Each step over colocated and over the step before, and the last over the best static choice (RLBoost's too)."""
    found = []
    before = BASE
    for name, comment in STEPS:
        arm = f"together {name}"
        speed, cost = (got.ratio(figure, arm, BASE) for figure in ("tokens_per_s", "tokens_per_usd"))
        if stalled := got.stalled(arm):
            over = stalled
        else:
            step = [got.ratio(figure, arm, before) for figure in ("tokens_per_s", "tokens_per_usd")]
            over = f"{comment}; over the step before {step[0]:.2f}x, {step[1]:.2f}x per dollar"
            before = arm
        found += [
            Finding(paper=PAPER, what=f"+ {name}: throughput over colocated", ours=speed, comment=over),
            Finding(paper=PAPER, what=f"+ {name}: tokens per dollar over colocated", ours=cost),
        ]
    found += [
        Finding(paper=PAPER, what=f"{name}: {what} over colocated", ours=got.ratio(figure, f"together {name}", BASE))
        for name in WITHOUT
        for figure, what in FIGURES
    ]
    for figure, what in FIGURES:
        found.append(_standing(got, figure, what))
        best = got.best(figure, "together")
        for kind, prefixes in (("synchronous", ("static",)), ("any", ("static", "one step off, static"))):
            static = max((got.best(figure, prefix) for prefix in prefixes), key=lambda arm: got.median(arm, figure))
            found.append(
                Finding(
                    paper=PAPER,
                    what=f"{what}: best step over the best {kind} static choice",
                    ours=got.ratio(figure, best, static),
                    least=1.0,
                    comment=f"{best.removeprefix('together ')} over {static}",
                )
            )
    return found


def _standing(got: Outcomes, figure: str, what: str) -> Finding:
    """The best standing crew with flow over the best static choice one step off."""
    best, static = got.best(figure, "standing with flow"), got.best(figure, "one step off, static")
    return Finding(
        paper=PAPER,
        what=f"{what}: standing with flow over the best static choice one step off",
        ours=got.ratio(figure, best, static),
        comment=f"{best} over {static}",
    )
