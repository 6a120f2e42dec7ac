"""What members cost while they wait for the next plan, beside what their starts would cost: which crew is cheaper.

A crew that stands pays for the wait and starts once; one that is started for each iteration pays for a start each time.
rollout.crew says which it is, for a whole execution. The plan shows both figures, so that a wrong choice is seen.
"""

from resources.prices import dollars
from storage.planning_records import DecisionRecord
from tasks.planning.outline import Outline
from tasks.planning.request import PlanningRequest

DECISION = "crew"


def crew_wait(request: PlanningRequest, outline: Outline) -> DecisionRecord | None:
    """The decision's record; None until starts and step times are measured, or if there is no crew.

    A wait lasts from the last response to the next plan. A start is that of a process with its engine and all weights,
    without the machine's: whether its machine is still there is not known.
    """
    crew = [(offer, count) for offer, count in zip(request.offers, outline.counts, strict=True) if count]
    if not request.measured or not crew or not any(offer.cold_start_s for offer, _ in crew):
        return None
    wait_s = max(0.0, outline.iteration_s - outline.rollout_s)
    usd_wait = sum(count * dollars(wait_s, offer.usd_per_h) for offer, count in crew)
    usd_start = sum(count * dollars(offer.cold_start_s, offer.usd_per_h) for offer, count in crew)
    cheaper = "standing" if usd_wait <= usd_start else "iteration"
    if request.crew == cheaper:
        reason = f"as rollout.crew says; '{cheaper}' is expected to cost less, too"
    else:
        reason = f"as rollout.crew says; '{cheaper}' is expected to cost less"
    return DecisionRecord(
        name=DECISION,
        chosen=request.crew,
        reason=reason,
        inputs={
            "wait_s": wait_s,
            "usd_wait": usd_wait,
            "usd_start": usd_start,
            **{f"{offer.pool}/start_s": offer.cold_start_s for offer, _ in crew},
        },
    )
