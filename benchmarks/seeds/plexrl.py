"""PlexRL (arXiv 2605.20863): GPU-hours that two runs on one trainer save over isolated runs, and sweeps around them.

Only the abstract [A] and what others tell of the paper [S] could be read: the savings, the shares of time without
compute, and the parallelism of training. The division of GPUs between rollout and training, the length of a cycle and
the switch time are not among that: they are chosen here and are no measurement of theirs. What is simulated is one
trainer with like runs (`tasks/sharing/shared_cycles.py`); nothing here runs members or trains.
"""

import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from benchmarks.seeds.findings import Finding
from storage.fleet.fleet_records import AdmittedRun
from tasks.sharing.shared_cycles import Conditions, saving, saving_bound, share_trainer

PAPER = "PlexRL"
# Both were chosen with all three savings in sight, so that no figure here is a prediction.
KNOBS = {
    "switch_s": "20, chosen: one round number that brings all three savings near",
    "rollout_gpus": "8, 64, 24 beside 16, 128, 96, chosen: the simplest split that allows the saving of each model",
}
CYCLE_S = 600.0
SWITCH_S = 20.0
ITERATIONS = 200
SWITCHES_S = (0.0, 2.0, 20.0, 60.0, 135.0)
RUNS = (1, 2, 3, 4, 5, 6)
TRAIN_SHARES = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6)
CORRELATIONS = (0.0, 0.5, 1.0)
# Hosts with unlike runs, which are drawn to look for a saving above the bound.
DRAWN = 300
GPUS = ((1, 1), (1, 2), (1, 4), (4, 1))
# How far two like runs one step off may be below the bound if phases and switches need no more of the trainer's time.
BELOW_BOUND_MAX, KEEPS_UP = 0.01, 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Like runs that share one trainer.

    train_share: the part of a synchronous cycle in which a run's trainer computes. ahead: how many iterations rollouts
    run ahead of training.
    """

    rollout_gpus: float
    trainer_gpus: float
    train_share: float
    runs: int = 2
    ahead: int = 0
    given: Conditions = field(default_factory=lambda: Conditions(switch_s=SWITCH_S))

    @property
    def bound(self) -> float:
        return saving_bound(self.runs, self.rollout_gpus, self.trainer_gpus)

    def with_switch(self, switch_s: float) -> "Setting":
        return replace(self, given=replace(self.given, switch_s=switch_s))


@dataclass(frozen=True, slots=True)
class Saved:
    """Medians over seeds. part: of all GPU-hours; negative: a loss."""

    slowdown: float
    part: float


# Published savings and their sources; the GPUs for training follow from the published parallelism [D], the shares in
# which they compute are 1 minus the published shares without compute [S].
PUBLISHED = {"7B": (0.3136, "[S]"), "30B": (0.3010, "[S]"), "235B": (0.3758, "[A]")}
MODELS = {
    "7B": Setting(rollout_gpus=8, trainer_gpus=16, train_share=1 - 0.8010),
    "30B": Setting(rollout_gpus=64, trainer_gpus=128, train_share=1 - 0.7067),
    "235B": Setting(rollout_gpus=24, trainer_gpus=96, train_share=1 - 0.8111),
}
SWEPT = Setting(rollout_gpus=1, trainer_gpus=2, train_share=0.2)


def measure(setting: Setting, seeds: Sequence[int]) -> Saved:
    """Simulate the runs for each seed."""
    runs = [
        AdmittedRun(
            id=str(number),
            run_url=f"memory://{number}",
            phase_s=setting.train_share * CYCLE_S,
            cycle_s=CYCLE_S,
            state_bytes=0,
            admitted_at_s=0.0,
            rollouts_ahead=setting.ahead,
        )
        for number in range(setting.runs)
    ]
    slowdown = statistics.median(
        share_trainer(runs, setting.given, iterations=ITERATIONS, seed=seed).slowdown_mean for seed in seeds
    )
    return Saved(slowdown, saving(slowdown, setting.runs, setting.rollout_gpus, setting.trainer_gpus))


def findings(seeds: Sequence[int]) -> list[Finding]:
    """The published savings beside ours, then what would change them."""
    found = []
    for model, setting in MODELS.items():
        published, mark = PUBLISHED[model]
        found.append(
            _finding(
                f"{model}: saved by two synchronous runs, switch {SWITCH_S:.0f} s", setting, seeds, published, mark
            )
        )
        found.append(_finding(f"{model}: saved one step off", replace(setting, ahead=1), seeds))
    sweeps = {f"switch {switch_s:.0f} s": SWEPT.with_switch(switch_s) for switch_s in SWITCHES_S}
    sweeps |= {f"{runs} runs": replace(SWEPT, runs=runs) for runs in RUNS}
    sweeps |= {f"{share:g} of a cycle trains": replace(SWEPT, train_share=share) for share in TRAIN_SHARES}
    for what, setting in sweeps.items():
        found.append(_finding(f"saved, {what}", setting, seeds))
        found.append(_finding(f"saved one step off, {what}", replace(setting, ahead=1), seeds))
    for correlation in CORRELATIONS:
        for together in (False, True):
            given = replace(SWEPT.given, correlation=correlation, together=together)
            begun = "begun at once" if together else "begun apart"
            what = f"3 runs, rollouts {correlation:g} correlated, {begun}"
            found.append(_finding(f"saved, {what}", replace(SWEPT, runs=3, given=given), seeds))
            found.append(_finding(f"saved one step off, {what}", replace(SWEPT, runs=3, given=given, ahead=1), seeds))
    return [*found, above_bound(), below_bound(seeds)]


def above_bound() -> Finding:
    """How far the saving of drawn unlike runs on one trainer is above the bound, at most."""
    most = max(_above_bound(random.Random(number)) for number in range(DRAWN))
    return Finding(
        paper=PAPER,
        what=f"most saved above the bound, {DRAWN} drawn hosts, each with {len(GPUS)} splits of GPUs",
        ours=most,
        share=True,
        # What the arithmetic may round.
        most=1e-9,
        comment="the bound is (k-1)T/(k(R+T)) for k runs with R and T GPUs for rollout and training",
    )


def _above_bound(rng: random.Random) -> float:
    count = rng.randint(1, 6)
    runs = [
        AdmittedRun(
            id=str(number),
            run_url=f"memory://{number}",
            phase_s=rng.uniform(0.02, 0.9) * CYCLE_S,
            cycle_s=CYCLE_S * rng.uniform(1.0, 3.0),
            state_bytes=0,
            admitted_at_s=0.0,
            share=rng.choice((0.5, 1.0, 2.0)),
            rollouts_ahead=rng.randint(0, 1),
        )
        for number in range(count)
    ]
    given = Conditions(
        switch_s=rng.choice((0.0, 2.0, 20.0, 135.0)),
        rollout_cv=rng.uniform(0.0, 1.0),
        phase_cv=rng.uniform(0.0, 0.5),
        correlation=rng.uniform(0.0, 1.0),
        together=rng.random() < 0.5,
    )
    slowdown = share_trainer(runs, given, iterations=30, seed=rng.randrange(1 << 30)).slowdown_mean
    return max(saving(slowdown, count, *gpus) - saving_bound(count, *gpus) for gpus in GPUS)


def below_bound(seeds: Sequence[int]) -> Finding:
    """How far two like runs one step off are below the bound, at most, while the trainer keeps up."""
    settings = [
        replace(SWEPT, train_share=share, ahead=1).with_switch(switch_s)
        for share in TRAIN_SHARES
        for switch_s in SWITCHES_S
        if 2 * (share + switch_s / CYCLE_S) <= KEEPS_UP
    ]
    below = []
    for setting in settings:
        slowdown = measure(setting, seeds).slowdown
        below.append((max(saving_bound(2, *gpus) - saving(slowdown, 2, *gpus) for gpus in GPUS), setting))
    most, worst = max(below, key=lambda each: each[0])
    return Finding(
        paper=PAPER,
        what="two runs one step off: below the bound at most",
        ours=most,
        share=True,
        most=BELOW_BOUND_MAX,
        comment=f"of {len(below)} settings that need at most {KEEPS_UP:g} of the trainer, with {len(GPUS)} splits of "
        f"GPUs each; in the worst {worst.train_share:g} of a cycle trains, with a switch of {worst.given.switch_s:g} s",
    )


def _finding(
    what: str, setting: Setting, seeds: Sequence[int], published: float | None = None, mark: str = ""
) -> Finding:
    saved = measure(setting, seeds)
    comment = f"{saved.slowdown:.3f} times as long, bound {setting.bound:.3f}"
    if published is not None:
        comment += (
            f"; {100 * (saved.part - published):+.1f} points; {setting.rollout_gpus:g} to {setting.trainer_gpus:g} "
            "GPUs for rollout and training, chosen"
        )
    return Finding(
        paper=PAPER,
        what=what,
        published=published,
        mark=mark,
        ours=saved.part,
        share=True,
        fitted=published is not None,
        comment=comment,
    )
