"""No spot machines, for hours or for ever, in RLBoost's settings: the cost over training without a crew.

Nothing here is published or fitted. With seeding, the trainer's machines generate again when no other member lives
(tasks.planning.seeding.generates_again), so an iteration should cost little more than a colocated one of the same work.
"""

from benchmarks.seeds.arms import (
    Arm,
    Outcomes,
    Preemption,
    colocated,
    scenario,
    with_counts,
    with_policy,
    with_pool,
    with_work,
)
from benchmarks.seeds.findings import Finding
from benchmarks.seeds.rlboost import MODELS, fixed
from tasks.forecasting.scenario import AvailabilityScenario, Scenario

PAPER = "outage"
SIZES = ("14B", "8B")
# All machines are gone from here on, in an iteration before which the planner has settled.
OUTAGE = Preemption(iteration=3, after_s=100.0, left=0, back_s=3 * 3600.0)
NEVER = AvailabilityScenario(counts=((0.0, 0),))
OVER_COLOCATED_MAX = 1.3


def arms() -> dict[str, Arm]:
    """Both sizes with an outage and with no machine ever, each with and without seeding, and colocated."""
    found: dict[str, Arm] = {}
    for size in SIZES:
        given = with_work(scenario(MODELS[size].scenario), iterations=OUTAGE.iteration + 1)
        there = with_counts(given, [(0.0, MODELS[size].instances)])
        absent = with_pool(fixed(given, MODELS[size].instances), availability=NEVER)
        found |= {
            f"{size} colocated": Arm(scenario=colocated(given)),
            f"{size} outage": Arm(scenario=there, preemption=OUTAGE),
            f"{size} outage without seeding": Arm(scenario=_unseeded(there), preemption=OUTAGE),
            f"{size} absent": Arm(scenario=absent),
            f"{size} absent without seeding": Arm(scenario=_unseeded(absent)),
        }
    return found


def _unseeded(given: Scenario) -> Scenario:
    return with_policy(given, planning={"seeding": "off"})


def findings(got: Outcomes) -> list[Finding]:
    """The iteration with the outage, and all iterations without machines, over colocated ones of the same work."""
    found = []
    for size in SIZES:
        base, outage, absent = f"{size} colocated", f"{size} outage", f"{size} absent"
        gone = f"{size}: all {MODELS[size].instances} machines gone at {OUTAGE.after_s:.0f} s for 3 h"
        found += [
            Finding(
                paper=PAPER,
                what=f"{gone}: that iteration's time over colocated",
                ours=got.ratio("last_s", outage, base),
                most=OVER_COLOCATED_MAX,
                comment=f"{got.median(outage, 'last_s'):.0f} s for {got.median(base, 'last_s'):.0f} s",
            ),
            Finding(
                paper=PAPER,
                what=f"{gone}: the same without seeding",
                ours=got.ratio("last_s", f"{outage} without seeding", base),
                comment=f"{got.median(f'{outage} without seeding', 'last_s'):.0f} s: until they are back",
            ),
            Finding(
                paper=PAPER,
                what=f"{size}: no machine ever: time over colocated",
                ours=got.ratio("duration_s", absent, base),
                most=OVER_COLOCATED_MAX,
                comment=f"without seeding {got.stalled(f'{absent} without seeding')}",
            ),
        ]
    return found
