"""A wide setting of our own: 64 members, 1,024 responses with a long tail, and training half as long as rollout.

A standing crew with flow is compared with the best static choice one step off: a crew of fixed size whose rollouts wait
for each other. Engines start for nothing there, so that all of the difference is the tail. Nothing here is published.
"""

from benchmarks.seeds.arms import Arm, Outcomes, scenario, with_policy
from benchmarks.seeds.findings import Finding
from benchmarks.seeds.rlboost import fixed

PAPER = "wide"
STATIC = (16, 32, 48, 64)
AHEAD = (0, 1, 2)
FLOW_LEAST = 1.2
SETTLED = 4


def arms() -> dict[str, Arm]:
    """Static choices one step off, with and without seeding, and standing crews with iterations ahead."""
    given = scenario("wide")
    found = {}
    for members in STATIC:
        for seeding in ("off", "auto"):
            static = with_policy(fixed(given, members), planning={"seeding": seeding}, max_staleness=1)
            found[f"static {members} seeding {seeding}"] = Arm(scenario=static, settle=SETTLED)
    for ahead in AHEAD:
        standing = with_policy(given, crew="standing", max_staleness=ahead)
        found[f"standing, {ahead} ahead"] = Arm(scenario=standing, settle=SETTLED)
    return found


def findings(got: Outcomes) -> list[Finding]:
    """Standing crews over the best static choice one step off, in throughput and per dollar."""
    found = []
    for figure, what in (("tokens_per_s", "throughput"), ("tokens_per_usd", "tokens per dollar")):
        best = got.best(figure, "static")
        for ahead in AHEAD:
            arm = f"standing, {ahead} ahead"
            over = got.ratios(figure, arm, best)
            took_s, best_s = (got.median(name, "duration_s") for name in (arm, best))
            found.append(
                Finding(
                    paper=PAPER,
                    what=f"{arm}: {what} over the best static choice one step off",
                    ours=over.median,
                    interval=over.interval,
                    least=FLOW_LEAST if ahead == 1 and figure == "tokens_per_s" else None,
                    comment=f"{took_s:.0f} s for {best_s:.0f} s ({best})",
                )
            )
    return found
