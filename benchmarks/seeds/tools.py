"""A setting of our own: responses wait for tools, and the planner chooses the width with and without knowing it.

16 members of the wide crew, which begin for nothing, and 256 responses; a planner to which waiting is decoding believes
that more members end an iteration sooner. Nothing here is published.
"""

from benchmarks.seeds.arms import Arm, Outcomes, scenario, with_policy, with_pool, with_work
from benchmarks.seeds.findings import Finding
from tasks.forecasting.scenario import ToolsScenario

PAPER = "tools"
MEMBERS, PROMPTS, GENERATIONS = 16, 16, 16
# (mean answers in a response, mean seconds of one, responses that a member decodes together)
WAITS = {
    "no tools": (0.0, 0.0, 32),
    "4 answers of 5 s": (4.0, 5.0, 32),
    "4 answers of 20 s": (4.0, 20.0, 32),
    "8 answers of 30 s": (8.0, 30.0, 32),
    "8 answers of 30 s, 4 places": (8.0, 30.0, 4),
}
SETTLED = 2


def arms() -> dict[str, Arm]:
    """For each way to wait, a planner that is told of it and one that is not."""
    found = {}
    for wait, (answers, answer_s, places) in WAITS.items():
        given = with_pool(scenario("wide"), count=MEMBERS, responses_max=places)
        given = with_work(
            given,
            num_prompts_per_step=PROMPTS,
            num_generations=GENERATIONS,
            tools=ToolsScenario(answers=answers, answer_s=answer_s),
        )
        given = with_policy(given, planning={"width": "cost"})
        for told, plans_tools in (("told", True), ("not told", False)):
            found[f"{wait}, {told}"] = Arm(scenario=with_policy(given, plans_tools=plans_tools), settle=SETTLED)
    return found


def findings(got: Outcomes) -> list[Finding]:
    """The planner that is told over the one that is not, in throughput, per dollar, and in both as it weighs them."""
    found = []
    for wait in WAITS:
        told, not_told = f"{wait}, told", f"{wait}, not told"
        for figure, what in (
            ("tokens_per_s", "throughput"),
            ("tokens_per_usd", "tokens per dollar"),
            ("worth", "both as the planner weighs them"),
        ):
            over = got.ratios(figure, told, not_told)
            members = [sum(outcome.members for outcome in got.of(arm)) / len(got.of(arm)) for arm in (told, not_told)]
            found.append(
                Finding(
                    paper=PAPER,
                    what=f"{wait}: {what}, told of the waiting over not told",
                    ours=over.median,
                    interval=over.interval,
                    least=1.0 if figure == "worth" else None,
                    comment=f"{members[0]:.1f} members for {members[1]:.1f}",
                )
            )
    return found
