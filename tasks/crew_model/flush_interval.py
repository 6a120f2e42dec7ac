"""How often a member should flush: the cost of flushing against the cost of a loss between two flushes.

Pure formulas; this module knows no prices and no store.
"""

import math

SECONDS_PER_HOUR = 3600.0
# The trainer reads the shard; the member looks for claims on its responses, and whether the iteration is closed.
GETS_PER_FLUSH = 3


def flush_usd(put_usd: float, get_usd: float, stall_s: float, machine_usd_per_h: float) -> float:
    """Dollars of one flush: one PUT, GETS_PER_FLUSH GETs, and `stall_s` seconds in which decoding stands still.

    A member flushes beside the decode loop, so the stall is about 0.
    """
    return put_usd + GETS_PER_FLUSH * get_usd + stall_s * machine_usd_per_h / SECONDS_PER_HOUR


def expected_usd_per_h(interval_s: float, usd_per_flush: float, losses_per_h: float, machine_usd_per_h: float) -> float:
    """Dollars per member-hour with a flush every `interval_s`: the flushes, and the work that losses destroy.

    losses_per_h counts unannounced losses; each destroys half an interval of the machine's time on average. Young, "A
    first order approximation to the optimum checkpoint interval", CACM 17 (1974), in dollars instead of seconds.
    """
    flushes_per_h = SECONDS_PER_HOUR / interval_s
    lost_s_per_h = losses_per_h * interval_s / 2
    return flushes_per_h * usd_per_flush + lost_s_per_h * machine_usd_per_h / SECONDS_PER_HOUR


def best_flush_interval_s(usd_per_flush: float, losses_per_h: float, machine_usd_per_h: float) -> float:
    """The interval in seconds with the lowest `expected_usd_per_h`: 3600 sqrt(2 c / (lambda p)).

    Infinite without losses, or with free machines. First order: right while the interval is short against the time
    between losses; beyond, Daly, Future Generation Computer Systems 22 (2006), has more terms. The formula leaves out
    the delay of the slowest response by a lost tail, which argues for a shorter interval.
    """
    loss_usd_per_h2 = losses_per_h * machine_usd_per_h
    if loss_usd_per_h2 == 0:
        return math.inf
    return SECONDS_PER_HOUR * math.sqrt(2 * usd_per_flush / loss_usd_per_h2)
