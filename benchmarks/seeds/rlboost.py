"""RLBoost (arXiv 2510.19225, NSDI'26): arms and findings.

Two knobs are fitted on Fig. 11 of 14B and are the same for every model: `responses_max` (the plateau of decoding, on
2.25x with six instances) and `lengths.sigma` (on +37 % with one). The number of instances of 32B is fitted on those in
use. All other figures are predictions, but not from nothing: rollout work and training time of 14B and 8B follow from
the seeding times in RLBoost's code, the price of spot machines from two of its ratios, and the median length from sigma
and the rollout work. So the headline is also shown with other responses in flight, and on traces that nothing was
fitted to.
"""

from dataclasses import dataclass
from pathlib import Path

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
from tasks.forecasting.scenario import AvailabilityScenario, Scenario

PAPER = "RLBoost"
KNOBS = {
    "responses_max": "32, fitted on Fig. 11, 14B: 2.25x with six instances; 12 come to 2.1x, but are few for such GPUs",
    "lengths.sigma": "0.5, fitted on Fig. 11, 14B: +37 % with one instance; no value reaches it",
    "instances of 32B": "7, fitted on the 5.7 in use",
}
# Until an instance has the weights, which the same seeding times imply.
TRANSFER_S = 5.0
SEGMENT_S = 7200.0
SETTLED = 5
COUNTS = (2, 4, 6, 8)
# The paper's ablation: six instances, then one, then six; how long each lasts is not published.
SIX_ONE_SIX = ((0.0, 6), (1800.0, 1), (3600.0, 6))
PREEMPTED_S = {100.0: 0.33, 200.0: 0.76}


@dataclass(frozen=True, kw_only=True)
class _Model:
    """instances: the most that are used. mean_instances: that of the published runs, derived from their two ratios.

    train_s, work_s: seconds of training and engine-seconds of rollout in a step, derived from the seeding times in
    RLBoost's code; None: nothing is published.
    """

    scenario: str
    instances: int
    throughput: float
    tokens_per_usd: float
    mean_instances: float
    train_s: float | None = None
    work_s: float | None = None

    def closed_form(self) -> str:
        """Throughput and tokens per dollar over veRL that follow from these figures alone, without any simulation.

        With N engines and n instances, which wait for weights first, the engines generate for (work_s - n (train_s -
        TRANSFER_S)) / (N + n) before training, and without instances for work_s / N. Lengths have no tail.
        """
        if self.train_s is None or self.work_s is None:
            return ""
        given = scenario(self.scenario)
        engines, instances = given.trainer.engines, self.mean_instances
        alone_s = self.train_s + self.work_s / engines
        left_s = max(0.0, self.work_s - instances * (self.train_s - TRANSFER_S))
        beside_s = self.train_s + left_s / (engines + instances)
        dearer = 1 + instances * given.pools[0].usd_per_h / given.trainer.usd_per_h
        speed = alone_s / beside_s
        return f"; the closed form from the same inputs gives {speed:.2f} and {speed / dearer:.2f} per dollar"


MODELS = {
    # [C] RLBoost's code has seeding times for one to four instances.
    "8B": _Model(
        scenario="rlboost_8b",
        instances=4,
        throughput=1.66,
        tokens_per_usd=1.34,
        mean_instances=3.8,
        train_s=132,
        work_s=1120,
    ),
    # [P App. E] N_prem of 14B at 14K.
    "14B": _Model(
        scenario="rlboost_14b",
        instances=6,
        throughput=1.97,
        tokens_per_usd=1.49,
        mean_instances=5.1,
        train_s=410,
        work_s=2130,
    ),
    # [N] A knob: so many are in use with the losses of the trace.
    "32B": _Model(scenario="rlboost_32b", instances=7, throughput=1.51, tokens_per_usd=1.28, mean_instances=5.7),
}


def arms(traces: Path | None) -> dict[str, Arm]:
    """All arms. traces: a folder with Bamboo's p3-trace.csv, which replaces the process fitted to it."""
    found: dict[str, Arm] = {}
    for name, model in MODELS.items():
        given = on_trace(model.scenario, traces)
        found[f"{name} colocated"] = Arm(scenario=with_work(colocated(given), iterations=6))
        found[f"{name} capped"] = Arm(scenario=fixed(given, model.instances), span_s=SEGMENT_S, settle=1)
        found[f"{name} planned"] = Arm(scenario=given, span_s=SEGMENT_S, settle=1)
    given = on_trace(MODELS["14B"].scenario, traces)
    return found | _fig_11(given) | _ablations(given) | _static(given)


def fixed(given: Scenario, instances: int) -> Scenario:
    """The scenario with a fixed number of places of the trace, all of them used."""
    return with_policy(with_pool(given, count=instances), planning={"width": "fixed"})


def on_trace(name: str, traces: Path | None) -> Scenario:
    """The scenario file, with Bamboo's p3-trace.csv from the folder instead of the process fitted to it."""
    given = scenario(name)
    if traces is None:
        return given
    return with_pool(given, availability=AvailabilityScenario(path=str(traces / "p3-trace.csv")))


def _fig_11(given: Scenario) -> dict[str, Arm]:
    steady = with_work(given, iterations=10)
    short = with_work(given, lengths={"cap": 5120}, iterations=10)
    return {
        "one": Arm(scenario=with_counts(steady, [(0.0, 1)]), settle=SETTLED),
        "six": Arm(scenario=with_counts(steady, [(0.0, 6)]), settle=SETTLED),
        "5K colocated": Arm(scenario=with_work(colocated(short), iterations=6)),
        "5K three": Arm(scenario=with_counts(short, [(0.0, 3)]), settle=SETTLED),
    }


def _ablations(given: Scenario) -> dict[str, Arm]:
    changing = with_counts(given, SIX_ONE_SIX)
    span_s = 5400.0
    found = {
        "6-1-6": Arm(scenario=changing, span_s=span_s),
        "6-1-6 without seeding": Arm(scenario=with_policy(changing, planning={"seeding": "off"}), span_s=span_s),
        "6-1-6 without memory": Arm(scenario=with_policy(changing, seeding_memory=False), span_s=span_s),
    }
    six = with_work(with_counts(given, [(0.0, 6)]), iterations=4)
    found["undisturbed"] = Arm(scenario=six)
    for after_s in PREEMPTED_S:
        for resume in ("token", "response"):
            for back_s in (None, 1.0):
                lost = Preemption(iteration=3, after_s=after_s, left=3, back_s=back_s)
                name = f"preempted {after_s:.0f} {resume} {'replaced' if back_s else 'lost'}"
                found[name] = Arm(scenario=with_policy(six, resume=resume), preemption=lost)
    return found


def _static(given: Scenario) -> dict[str, Arm]:
    """Fixed numbers of instances of the trace, with and without seeding, and reserved ones as in Disagg.BAL."""
    found: dict[str, Arm] = {}
    for instances in COUNTS:
        for seeding in ("auto", "off"):
            static = with_policy(fixed(given, instances), planning={"seeding": seeding})
            found[f"static {instances} seeding {seeding}"] = Arm(scenario=static, span_s=SEGMENT_S, settle=1)
        price = given.trainer.usd_per_h * given.pools[0].gpus / given.trainer.gpus
        reserved = with_pool(fixed(given, instances), usd_per_h=price, interruptible=False, availability=None)
        reserved = with_policy(with_work(reserved, iterations=6), planning={"seeding": "off"})
        found[f"reserved {instances}"] = Arm(scenario=reserved, settle=2)
    return found


def findings(got: Outcomes) -> list[Finding]:
    return [
        *_of_models(got),
        *_of_fig_11(got),
        *_of_ablations(got),
        *_of_static(got),
    ]


def _of_models(got: Outcomes) -> list[Finding]:
    found = []
    for name, model in MODELS.items():
        base, capped, planned = f"{name} colocated", f"{name} capped", f"{name} planned"
        size = " (T and R inferred)" if name == "32B" else ""
        found += [
            Finding(
                paper=PAPER,
                what=f"{name} throughput over veRL",
                published=model.throughput,
                mark="[P]",
                ours=got.ratio("tokens_per_s", capped, base),
                comment=f"at most {model.instances} instances; mean of 3 segments there, of 2 h windows here{size}"
                + model.closed_form(),
            ),
            Finding(
                paper=PAPER,
                what=f"{name} tokens per dollar over veRL",
                published=model.tokens_per_usd,
                mark="[P]",
                ours=got.ratio("tokens_per_usd", capped, base),
                follows="throughput and instances",
                comment="with cold starts, which are not in the paper's",
            ),
            Finding(
                paper=PAPER,
                what=f"{name} instances in use",
                published=model.mean_instances,
                mark="[D]",
                ours=got.median(capped, "members"),
                fitted=name == "32B",
            ),
            Finding(
                paper=PAPER,
                what=f"{name} throughput, width planned of 16",
                ours=got.ratio("tokens_per_s", planned, base),
                comment=f"production's N_prem and width; {got.median(planned, 'members'):.1f} in use",
            ),
        ]
    return found


def _of_fig_11(got: Outcomes) -> list[Finding]:
    base = "14B colocated"
    bound = "10 GPUs for 8 do at most 1.25x; the rest must come from the baseline's tail"
    rows = (
        ("one instance: throughput", 1.37, "[P]", "one", base, "tokens_per_s", True, bound),
        (
            "one instance: cost per token",
            0.78,
            "[P]",
            base,
            "one",
            "tokens_per_usd",
            False,
            "",
        ),
        ("six instances: throughput", 2.247, "[P]", "six", base, "tokens_per_s", True, _ramp(got)),
        ("six instances: cost per token", 0.616, "[P]", base, "six", "tokens_per_usd", False, ""),
        ("5K, three instances: throughput", 1.47, "[P]", "5K three", "5K colocated", "tokens_per_s", False, ""),
        ("5K, three: tokens per dollar", 1.24, "[P]", "5K three", "5K colocated", "tokens_per_usd", False, ""),
        ("14K, six: tokens per dollar", 1.61, "[P]", "six", base, "tokens_per_usd", False, ""),
    )
    return [
        Finding(
            paper=PAPER,
            what=what,
            published=published,
            mark=mark,
            ours=got.ratio(figure, arm, other),
            fitted=fitted,
            follows="throughput and the price" if figure == "tokens_per_usd" else "",
            comment=comment,
        )
        for what, published, mark, arm, other, figure, fitted, comment in rows
    ]


def _ramp(got: Outcomes) -> str:
    waits_s = got.median("six", "duration_s") - got.median("six", "train_s")
    return f"the trainer waits {waits_s:.0f} s for the first whole groups and the last; the closed form has 5 s"


def _of_ablations(got: Outcomes) -> list[Finding]:
    whole = "6-1-6"
    found = [
        Finding(
            paper=PAPER,
            what="6-1-6: throughput without seeding",
            published=0.81,
            mark="[P]",
            ours=got.ratio("tokens_per_s", f"{whole} without seeding", whole),
            comment=f"{got.median(whole, 'seeding_s'):.0f} s of seeding on average, {_one_needs_s(got):.0f} s with one "
            "instance all along: that one is left is known an iteration later",
        ),
        Finding(
            paper=PAPER,
            what="6-1-6: throughput with memory",
            published=1.06,
            mark="[P]",
            ours=got.ratio("tokens_per_s", whole, f"{whole} without memory"),
            comment="production begins from the closed form where nothing is remembered",
        ),
    ]
    for after_s, published in PREEMPTED_S.items():
        for fate in ("lost", "replaced"):
            token, response = (f"preempted {after_s:.0f} {resume} {fate}" for resume in ("token", "response"))
            found.append(
                Finding(
                    paper=PAPER,
                    what=f"3 of 6 {fate} at {after_s:.0f} s: overhead saved by migration",
                    published=published,
                    mark="[P]",
                    share=True,
                    ours=got.kept_share(token, response, "undisturbed"),
                    comment="whether they are replaced is not said" if fate == "lost" else "after a cold start",
                )
            )
    return found


def _one_needs_s(got: Outcomes) -> float:
    return got.median("one", "seeding_s")


def _of_static(got: Outcomes) -> list[Finding]:
    capped, base = "14B capped", "14B colocated"
    reserved = got.best("tokens_per_usd", "reserved")
    quickest, cheapest = got.best("tokens_per_s", "static"), got.best("tokens_per_usd", "static")
    return [
        Finding(
            paper=PAPER,
            what="cost per token of reserved instances (Disagg.BAL)",
            published=1.75,
            mark="[P]",
            ours=got.ratio("tokens_per_usd", capped, reserved),
            comment=f"the cheapest of {COUNTS}: {reserved}",
        ),
        Finding(
            paper=PAPER,
            what="throughput over the best fixed number",
            ours=got.ratio("tokens_per_s", capped, quickest),
            comment=f"{quickest}: {got.ratio('tokens_per_s', quickest, base):.2f}x veRL",
        ),
        Finding(
            paper=PAPER,
            what="tokens per dollar over the best fixed number",
            ours=got.ratio("tokens_per_usd", capped, cheapest),
            comment=f"{cheapest}: {got.ratio('tokens_per_usd', cheapest, base):.2f}x veRL",
        ),
    ]
