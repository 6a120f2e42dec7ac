"""The checks for absent members: the iteration does not wait for them, and members that come too late write nothing.

The checks use only the times at which requests reached the store.
"""

from collections.abc import Collection

from simulation.ledger import Ledger
from simulation.simulated_history import History
from storage.records import layout


def is_member(name: str) -> bool:
    """Whether this is an incarnation's name, not that of the trainer, the observer or Flyte."""
    return name.split("-", maxsplit=1)[0].isdecimal()


def check_latecomers(ledger: Ledger) -> None:
    """Check that a member whose first request comes after the iteration was closed claims and writes nothing."""
    closed_s = ledger.created_at_s.get(layout.closed(ledger.iteration))
    if closed_s is None:
        return
    for name, life in ledger.lives.items():
        if is_member(name) and life.first_s > closed_s and ledger.writes.get(name):
            ledger.breaks(f"late: {name} came after closing and wrote {ledger.writes[name]} times")


def check_waiting(ledger: Ledger, history: History, news: Collection[str]) -> float:
    """Check that tokens that count are journalled at least every `wait_s_max`, until none is missing.

    Faults restart the time; delays of connections to the store are added, and the time to read what is journalled: the
    member that continues alone reads shard after shard ahead of its claim. news: the keys of the shards that count.
    Returns the longest wait as a share of the allowed one; 0 if any wait is allowed.
    """
    if history.absence is None:
        return 0.0
    closed_s = ledger.created_at_s.get(layout.closed(ledger.iteration))
    written = [(ledger.created_at_s[key],) * 2 for key in news]
    last_s = max((at_s for at_s, _ in written), default=0.0)
    over_s = ledger.now() if closed_s is None else min(last_s, closed_s)
    moments = [*written, *ledger.faults, (over_s, over_s)]
    shards_s = [at_s for key, at_s in ledger.created_at_s.items() if "/journal/" in key]
    since_s, part = 0.0, 0.0
    for at_s, until_s in sorted(moment for moment in moments if moment[0] <= over_s):
        delays_s = sum(delay_s for begun_s, delay_s in ledger.delays if since_s <= begun_s < at_s)
        reading_s = 2 * history.weather.latency_s * sum(begun_s <= since_s for begun_s in shards_s)
        allowed_s = history.wait_s_max + delays_s + reading_s
        part = max(part, (at_s - since_s) / allowed_s)
        if at_s - since_s > allowed_s:
            span = f"from {since_s:.0f} s until {at_s:.0f} s; allowed: {allowed_s:.0f} s"
            ledger.breaks(f"waits: nothing was journalled {span}")
        since_s = max(since_s, until_s)
    return part
