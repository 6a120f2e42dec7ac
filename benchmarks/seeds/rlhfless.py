"""RLHFless (arXiv 2602.22718): arms and findings.

The knob `lengths.sigma` is fitted on the cost cut of 44.8 % (3B), and `lengths.rho` and `lengths.epoch_change_tokens`
on how lengths change between epochs; all other figures are predictions. Costs are GPU-seconds as serverless functions
are billed: the crew's machines from start to leaving, and the trainer's while they train.
"""

import statistics
from collections.abc import Sequence

import numpy as np

from benchmarks.seeds.arms import Arm, Outcomes, scenario, with_policy, with_pool, with_work
from benchmarks.seeds.findings import Finding
from benchmarks.seeds.global_cut import crew_gpu_s
from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.scenario import Scenario

PAPER = "RLHFless"
KNOBS = {
    "lengths.sigma": "0.4, fitted on the cost cut of 44.8 %, 3B",
    "lengths.rho": "0.98, fitted on lengths of which 0.7 change by 50 tokens at most between epochs",
    "lengths.epoch_change_tokens": "45.0, fitted on lengths of which 0.9 change by 100 tokens at most between epochs",
}
MODELS = {"3B": "rlhfless_3b", "7B": "rlhfless_7b"}
BASE = 3
COLD_S = (30.0, 100.0, 300.0)
CUT_SHARES = (0.3, 0.5, 0.9)
# An epoch has four iterations; the length history learns from the first epoch.
EPOCH = 4


def arms() -> dict[str, Arm]:
    found: dict[str, Arm] = {}
    for model, name in MODELS.items():
        given = _sized(name)
        for members in range(1, given.pools[0].count + 1):
            found[f"{model} static {members}"] = _arm(static(given, members))
        found[f"{model} planned"] = _arm(given)
        found[f"{model} for time"] = _arm(with_policy(given, planning={"cost_weight": 0.0} | _QUICK))
        found[f"{model} oracle"] = _arm(with_policy(given, predictor="oracle"), minor=True)
    given = _sized(MODELS["3B"])
    found["three, assigned and cut"] = _arm(with_pool(given, count=BASE, count_min=BASE))
    found["three, assigned"] = _arm(
        with_policy(with_pool(given, count=BASE, count_min=BASE), planning={"cut_share": None})
    )
    for share in CUT_SHARES:
        found[f"tau {share}"] = _arm(with_policy(given, planning={"cut_share": share}), minor=True)
    for start_s in COLD_S:
        for name, changed in (("planned", given), ("static 3", static(given, BASE)), ("static 1", static(given, 1))):
            found[f"cold {start_s:.0f} s, {name}"] = _arm(with_pool(changed, start_s=start_s), minor=True)
    for name, changed in (("planned", given), ("static 3", static(given, BASE)), ("static 1", static(given, 1))):
        found[f"warm, {name}"] = _arm(with_pool(changed, kept=True), minor=True)
    return found


_QUICK = {"objective": "makespan", "cut_share": None}


def _sized(name: str) -> Scenario:
    given = scenario(name)
    prompts = EPOCH * given.work.num_prompts_per_step
    return with_work(given, prompts_in_dataset=prompts, iterations=2 * EPOCH)


def _arm(given: Scenario, *, minor: bool = False) -> Arm:
    return Arm(scenario=given, settle=EPOCH, minor=minor)


def static(given: Scenario, members: int) -> Scenario:
    """A fixed number of actors in every iteration, groups dealt in turn, all kept until the last response has ended."""
    off = with_policy(
        given, predictor="none", balance=False, planning={"width": "fixed", "dispatch": "in_turn"} | _QUICK
    )
    return with_pool(off, count=members, count_min=members)


def findings(got: Outcomes, seeds: Sequence[int]) -> list[Finding]:
    return [
        *(finding for model in MODELS for finding in _of_model(got, model)),
        *_of_assignment(got, seeds),
        *_of_starts(got),
        *(
            Finding(
                paper=PAPER,
                what=f"3B, tau {share}: cost over three actors",
                ours=got.ratio("gpu_s", f"tau {share}", f"3B static {BASE}"),
                comment=f"speed {got.ratio('speed', f'tau {share}', f'3B static {BASE}'):.2f}x",
            )
            for share in CUT_SHARES
        ),
        _of_history(seeds),
    ]


def _of_model(got: Outcomes, model: str) -> list[Finding]:
    base, planned, quick = f"{model} static {BASE}", f"{model} planned", f"{model} for time"
    cheapest = got.best("gpu_s", f"{model} static", min)
    quickest = got.best("speed", f"{model} static")
    members = got.median(planned, "members")
    return [
        Finding(
            paper=PAPER,
            what=f"{model}: cost over three actors",
            published=1 - 0.448,
            mark="[P] at best",
            ours=got.ratio("gpu_s", planned, base),
            fitted=model == "3B",
            comment=f"as the paper counts: nothing for starts; {members:.1f} actors",
        ),
        Finding(
            paper=PAPER,
            what=f"{model}: speed over three actors",
            published=1.35,
            mark="[P] at best",
            ours=got.ratio("speed", planned, base),
            comment=f"the longest response binds: no static number exceeds {got.ratio('speed', quickest, base):.2f}x; "
            f"all for time {got.ratio('speed', quick, base):.2f}x at {got.ratio('gpu_s', quick, base):.2f} of the cost",
        ),
        Finding(
            paper=PAPER,
            what=f"{model}: cost over the best static number",
            ours=got.ratio("gpu_s", planned, cheapest),
            comment=f"{cheapest}, {got.ratio('speed', cheapest, base):.2f}x as fast as three",
        ),
        Finding(
            paper=PAPER,
            what=f"{model}: speed over the quickest static number",
            ours=got.ratio("speed", quick, quickest),
            comment=f"all for time, over {quickest}",
        ),
        Finding(
            paper=PAPER,
            what=f"{model}: cost with perfect lengths over history",
            ours=got.ratio("gpu_s", f"{model} oracle", planned),
        ),
    ]


def _of_assignment(got: Outcomes, seeds: Sequence[int]) -> list[Finding]:
    given = _sized(MODELS["3B"])
    counted = range(EPOCH, 2 * EPOCH)
    share = given.policy.planning.cut_share or 0.7
    cut = statistics.median(
        statistics.mean(crew_gpu_s(given, BASE, share, seed, iteration) for iteration in counted) for seed in seeds
    )
    trainer = got.median("three, assigned and cut", "trainer_gpu_s")
    return [
        Finding(
            paper=PAPER,
            what="3B: assignment and own cuts over a global cut, cost",
            published=1 - 0.128,
            mark="[P]",
            ours=got.median("three, assigned and cut", "gpu_s") / (cut + trainer),
            comment="three actors at most in both; the global cut replayed without starts",
        ),
        Finding(
            paper=PAPER,
            what="3B: cost of cutting over assignment alone",
            ours=got.ratio("gpu_s", "three, assigned and cut", "three, assigned"),
        ),
    ]


def _of_starts(got: Outcomes) -> list[Finding]:
    names = [f"cold {start_s:.0f} s" for start_s in COLD_S] + ["warm"]
    found = []
    for name in names:
        planned, static_3, static_1 = (f"{name}, {which}" for which in ("planned", "static 3", "static 1"))
        what = "warm pool, idle time paid" if name == "warm" else f"{name}, paid for in every iteration"
        found.append(
            Finding(
                paper=PAPER,
                what=f"3B, {what}: cost over three actors",
                ours=got.ratio("gpu_s", planned, static_3),
                comment=f"speed {got.ratio('speed', planned, static_3):.2f}x; "
                f"over one static actor {got.ratio('gpu_s', planned, static_1):.2f}",
            )
        )
    return found


def _of_history(seeds: Sequence[int]) -> Finding:
    """The drawn lengths against the paper's measurement of its own."""
    given = _sized(MODELS["3B"])
    within, further = [], []
    for seed in seeds:
        drawn = ResponseLengths(given.work, seed)
        by_prompt = [
            {
                int(p): row
                for i in range(EPOCH)
                for p, row in zip(drawn.prompts(e * EPOCH + i), drawn.lengths(e * EPOCH + i), strict=True)
            }
            for e in range(2)
        ]
        change = np.concatenate([np.abs(by_prompt[1][p] - row) for p, row in by_prompt[0].items()])
        within.append(float((change <= 50).mean()))
        further.append(float((change <= 100).mean()))
    return Finding(
        paper=PAPER,
        what="3B: lengths that change by 50 tokens at most between epochs",
        published=0.7,
        mark="[P]",
        ours=statistics.median(within),
        share=True,
        fitted=True,
        comment=f"{statistics.median(further):.2f} by 100 at most, 0.9 published; an input",
    )
