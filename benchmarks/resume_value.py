"""Whether it pays to resume a response at its last token: expected engine time under losses, in closed form.

This module knows numbers only. What it leaves out favours resumption: the iteration waits for its slowest response, and
a response that begins again is the slowest; machines that announce their loss flush first and lose nothing. The start
of a new machine is left out because every design pays it.

Derivation. Let losses come with rate lambda = 1/M, and let work be safe whenever `interval` of it is done, at a cost of
`write` each time. An interval that is struck begins again after `restart`, in which another loss may strike. With E the
expected time of an interval (Daly 2006, "A higher order estimate of the optimum checkpoint interval for restart dumps",
eq. 20): E = M exp(restart / M) (exp((interval + write) / M) - 1). Three designs differ in what an interval is: the
batch of a member, a response, or a flush of the journal.
"""

import math
from dataclasses import dataclass

_SECONDS_PER_HOUR = 3600.0
_LOSSES_PER_H_MIN, _LOSSES_PER_H_MAX = 1e-9, 1000.0
_EXPONENT_MAX = 700.0


@dataclass(frozen=True, kw_only=True)
class EngineCosts:
    """The speeds and overheads of a member's engine and its store.

    Attributes:
        responses_in_flight: responses decoded together; a loss strikes all of them.
        decode_tokens_per_s: rate of one response.
        prefill_tokens_per_s: rate of the engine; while it prefills, nothing is decoded.
        journal_share: time that journalling adds to decoding, as a share of it.
        flush_interval_s: seconds of decoding between two shards.
        takeover_s: from the start of a successor to its first prefill: claiming, and reading the journal.
    """

    responses_in_flight: int
    decode_tokens_per_s: float
    prefill_tokens_per_s: float
    journal_share: float
    flush_interval_s: float
    takeover_s: float


@dataclass(frozen=True, slots=True)
class ResumeCosts:
    """Expected seconds that a response occupies its place in an engine's batch, by what a loss destroys."""

    work_s: float
    whole_batch_s: float
    whole_response_s: float
    since_flush_s: float

    @property
    def saving(self) -> float:
        """The share of a response-level design's time that resumption at the token saves; negative if it costs time."""
        return 1.0 - self.since_flush_s / self.whole_response_s


def expected_duration_s(
    work_s: float, *, interval_s: float, write_s: float, restart_s: float, losses_per_h: float
) -> float:
    """Expected seconds until `work_s` of work are done, made safe every `interval_s` (see the module's derivation).

    Infinite if it exceeds a float's range: such work is never done.
    """
    intervals = work_s / interval_s
    if losses_per_h == 0:
        return intervals * (interval_s + write_s)
    mean_s = _SECONDS_PER_HOUR / losses_per_h
    if (restart_s + interval_s + write_s) / mean_s > _EXPONENT_MAX:
        return math.inf
    return intervals * mean_s * math.exp(restart_s / mean_s) * math.expm1((interval_s + write_s) / mean_s)


def resume_costs(
    costs: EngineCosts, *, prompt_tokens: int, response_tokens: int, losses_per_h: float, waves: int = 1
) -> ResumeCosts:
    """Expected time of one response under three designs.

    A prefill of one token delays the whole batch by 1 / prefill_tokens_per_s, and after a loss every response in flight
    needs its own prefill: hence the factor responses_in_flight. A loss strikes at a uniformly random token, so the
    prefix to prefill is half a response on average; the interval and the exponential use that mean.

    Args:
        costs: of the engine and the store.
        prompt_tokens: per response; a prompt shared by a group counts for its share.
        response_tokens: every response's length.
        losses_per_h: unannounced losses per member-hour.
        waves: how many responses a place in the batch decodes one after another until a member's batch is complete; a
            design that keeps nothing until then loses all of them.
    """
    decode_s = response_tokens / costs.decode_tokens_per_s
    prefill_s = costs.responses_in_flight / costs.prefill_tokens_per_s
    work_s = decode_s + prompt_tokens * prefill_s

    def again(interval_s: float) -> float:
        return expected_duration_s(work_s, interval_s=interval_s, write_s=0.0, restart_s=0.0, losses_per_h=losses_per_h)

    interval_s = min(costs.flush_interval_s, decode_s)
    resumed_s = expected_duration_s(
        decode_s,
        interval_s=interval_s,
        write_s=costs.journal_share * interval_s,
        restart_s=costs.takeover_s + (prompt_tokens + response_tokens / 2) * prefill_s,
        losses_per_h=losses_per_h,
    )
    return ResumeCosts(work_s, again(waves * work_s), again(work_s), prompt_tokens * prefill_s + resumed_s)


def break_even_losses_per_h(costs: EngineCosts, *, prompt_tokens: int, response_tokens: int) -> float | None:
    """Losses per member-hour above which resuming at the token costs less than beginning responses again.

    None: there is no such rate up to 1000 per hour. By bisection; relative error 1e-6.
    """

    def saves(losses_per_h: float) -> bool:
        found = resume_costs(
            costs, prompt_tokens=prompt_tokens, response_tokens=response_tokens, losses_per_h=losses_per_h
        )
        return found.since_flush_s < found.whole_response_s

    # Searched from above, because at absurd rates no design ends and the comparison means nothing.
    high = next((rate for rate in (_LOSSES_PER_H_MAX / 2**k for k in range(40)) if saves(rate)), None)
    if high is None:
        return None
    low = _LOSSES_PER_H_MIN
    if saves(low):
        return 0.0
    while high / low > 1 + 1e-6:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if saves(middle) else (middle, high)
    return high
