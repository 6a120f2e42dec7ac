"""A look at a run, and what its reports add up to, in Prometheus' text format. Pure: no store, no clock, no port.

The format is a dozen lines, so no library is asked for; tests compare the text with what promtool accepts.
"""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from resources.visible_text import visible
from storage.package_version import VERSION
from tasks.reporting.crew_view import MemberState, Phase, RunView

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
# By family: the metric of docs/guide/metrics.md that it is, and what it says. Sums are over all committed iterations.
SUMS = {
    "gleaner_tokens_total": ("num_tokens", "Response tokens of committed iterations."),
    "gleaner_tokens_recovered_total": ("resume/tokens_recovered", "Tokens that resuming saved."),
    "gleaner_tokens_regenerated_total": ("resume/tokens_regenerated", "Tokens that were decoded and do not count."),
    "gleaner_losses_total": ("preempt/count", "Members that were lost, or left with unfinished responses."),
    "gleaner_reward_errors_total": ("reward_errors", "Calls of reward functions that failed."),
    "gleaner_answers_given_up_total": ("answers_given_up", "Answers that a verifier gave up on; they count as 0."),
    "gleaner_cost_usd_total": ("cost/usd_iter", "Dollars of committed iterations, trainer included."),
    "gleaner_iteration_seconds_total": ("timing_s/iteration", "Seconds of committed iterations, plan to report."),
    "gleaner_trainer_wait_seconds_total": ("timing_s/wait", "Seconds in which the trainer waited for responses."),
}
NEWEST = {
    "gleaner_reward": ("reward", "Mean reward of the newest committed iteration."),
    "gleaner_reward_zero_std_ratio": ("frac_reward_zero_std", "Share of its groups whose rewards are all equal."),
    "gleaner_response_length_tokens": ("completions/mean_length", "Mean length of its responses."),
    "gleaner_responses_clipped_ratio": ("completions/clipped_ratio", "Share of its responses that were cut."),
    "gleaner_entropy_nats": ("entropy", "Entropy of the policy at its trained tokens."),
    "gleaner_mismatch_kl_nats": ("mismatch_kl", "How far its sampler and trainer disagree."),
    "gleaner_gradient_norm": ("actor/grad_norm", "Norm of its gradient before clipping."),
}


@dataclass(frozen=True, slots=True)
class Family:
    """A metric with its samples; a metric with an unknown value has no samples.

    Attributes:
        name: The name.
        kind: The type in Prometheus' text format.
        what: The help text.
        samples: (labels, value) of each sample.
    """

    name: str
    kind: Literal["gauge", "counter"]
    what: str
    samples: tuple[tuple[Mapping[str, str], float], ...]

    def lines(self, run: str) -> Iterator[str]:
        """Its lines; every sample carries the run, too."""
        if not self.samples:
            return
        yield f"# HELP {self.name} {self.what}"
        yield f"# TYPE {self.name} {self.kind}"
        for labels, value in self.samples:
            shown = ",".join(f'{name}="{_escaped(text)}"' for name, text in ({"run": run} | dict(labels)).items())
            yield f"{self.name}{{{shown}}} {_number(value)}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Committed:
    """The sum of the reports of committed iterations.

    Attributes:
        iterations: How many iterations are committed.
        sums: Sums of metrics over the iterations.
        newest: The metrics of the newest iteration.
    """

    iterations: int = 0
    sums: Mapping[str, float]
    newest: Mapping[str, float]


def exposition(view: RunView, committed: Committed, progress_age_s: float) -> str:
    """All metrics of a run. progress_age_s: for how long the watcher has seen nothing move."""
    families = [
        _of_failures(view),
        *_of_the_look(view, progress_age_s),
        *_of_the_iteration(view),
        *_of_reports(committed),
    ]
    return "".join(f"{line}\n" for family in families for line in family.lines(view.run_url))


def _of_failures(view: RunView) -> Family:
    samples = tuple(
        (
            {
                "task": failure.task,
                "iteration": str(failure.iteration),
                "slot": "" if failure.slot is None else str(failure.slot),
                "error": visible(failure.error),
            },
            failure.at_s,
        )
        for failure in view.failures
    )
    what = "When a task failed that has not succeeded since, in seconds since 1970."
    return Family("gleaner_failure_time_seconds", "gauge", what, samples)


def _of_the_look(view: RunView, progress_age_s: float) -> Iterable[Family]:
    phases = tuple(({"phase": name}, float(name == view.phase)) for name in get_args(Phase))
    return (
        Family("gleaner_info", "gauge", "Version of the watcher; always 1.", (({"version": VERSION}, 1.0),)),
        _gauge("gleaner_store_answers", "1 if the store answered the last look, else 0.", not view.notice),
        _gauge("gleaner_iteration", "The iteration in progress.", view.iteration),
        Family("gleaner_phase", "gauge", "1 for the phase of that iteration, 0 for the others.", phases),
        _gauge("gleaner_phase_seen_seconds", "How long the watcher has seen the phase.", view.phase_seen_s),
        _gauge("gleaner_progress_age_seconds", "How long the watcher has seen no progress.", progress_age_s),
    )


def _of_the_iteration(view: RunView) -> Iterable[Family]:
    totals = view.totals
    counted = Counter((member.pool, member.state) for member in view.members)
    pools = sorted({pool for pool, _ in counted})
    members = tuple(
        ({"pool": pool, "state": state}, float(counted[pool, state]))
        for pool in pools
        for state in get_args(MemberState)
    )
    return (
        _gauge("gleaner_responses_planned", "Responses of the iteration.", totals.responses_planned),
        _gauge("gleaner_responses_done", "Of these, how many have ended.", totals.responses_done),
        _gauge("gleaner_groups_planned", "Groups of the iteration.", totals.groups_planned),
        _gauge("gleaner_groups_recorded", "Of these, how many the trainer has recorded.", totals.groups_recorded),
        _gauge("gleaner_journalled_tokens", "Tokens of the iteration so far that count.", totals.tokens),
        _gauge("gleaner_responses_moved", "How often a response went from slot to slot.", totals.moved),
        _gauge("gleaner_decode_tokens_per_second", "Of all members at work.", totals.tokens_per_s),
        _gauge("gleaner_reward_so_far", "Mean reward of the responses recorded so far.", totals.reward),
        _gauge("gleaner_members_usd_per_hour", "Of living members, without the trainer.", totals.usd_per_h),
        _gauge("gleaner_rollout_remaining_seconds", "Until the last response ends.", totals.to_go_s),
        Family("gleaner_members", "gauge", "Members by pool and state.", members),
    )


def _of_reports(committed: Committed) -> Iterator[Family]:
    yield Family("gleaner_iterations_total", "counter", "Committed iterations.", (({}, float(committed.iterations)),))
    for name, (_, what) in SUMS.items():
        yield Family(name, "counter", what, (({}, committed.sums.get(name, 0.0)),))
    for name, (metric, what) in NEWEST.items():
        yield _gauge(name, what, committed.newest.get(metric))


def _gauge(name: str, what: str, value: float | None) -> Family:
    return Family(name, "gauge", what, () if value is None else (({}, float(value)),))


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return repr(int(value)) if value == int(value) else repr(value)
