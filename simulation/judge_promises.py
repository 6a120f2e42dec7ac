"""The checks of what is promised to the user, of tokens, notices and work in vain.

A kill costs at most what was decoded since the last flush. A notice costs nothing. A member soon stops decoding what no
longer counts. The checks compare what engines returned, and when, with the shards in the store. A stretch of time in
which a process could not reach the store, or stood still, excuses it.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulation.ledger import Decoded, Ledger
from simulation.simulated_history import SLOWEST_CLOCK, History
from simulation.stored_objects import batch_of
from storage.journal.shard import Row
from storage.records import layout
from storage.records.records import PlanRecord

# Without faults a member makes at most this many requests, each with a way to the store and one back, in a round of the
# flush lane (a shard, a heartbeat) and in one of the claim lane (claims, the end, a look, which reads other journals).
FLUSH_REQUESTS, CLAIM_REQUESTS = 2, 100
KILLED = "Crashed"
Written = Sequence[tuple[float, Row]]


@dataclass(frozen=True)
class Promises:
    """The material of the checks of one history.

    Attributes:
        written: by incarnation and response, (time of arrival in the store, row).
        owners: by response, (time of the claim, incarnation), in order.
    """

    ledger: Ledger
    history: History
    written: Mapping[tuple[str, int], Written]
    owners: Mapping[int, Sequence[tuple[float, str]]]

    @property
    def exposed_s(self) -> float:
        """How long a token may be in one process only: a flush interval of the slowest clock, and two rounds.

        The two rounds: a token may come just after one began, and the next one may take longer than foreseen.
        """
        rounds_s = 2 * 2 * FLUSH_REQUESTS * self.history.weather.latency_s
        return self.history.flush_interval_s / SLOWEST_CLOCK + self.history.slowest_step_s + rounds_s

    @property
    def unaware_s(self) -> float:
        """How long a member may not know of a claim or of the end: two intervals of the slowest clock, and a round."""
        history = self.history
        interval_s = max(history.flush_interval_s, history.heartbeat_interval_s)
        round_s = 2 * CLAIM_REQUESTS * history.weather.latency_s
        return (history.flush_interval_s + interval_s) / SLOWEST_CLOCK + history.slowest_step_s + round_s

    def check(self) -> float:
        """Check all; returns the longest time that a token was in one process only, as a share of the allowed one."""
        longest = 0.0
        for name, decoded in self.ledger.decoded.items():
            for chunk in decoded:
                lost_s = self._lost_s(name, chunk)
                longest = max(longest, self._check_durable(name, chunk, lost_s))
                self._check_worth(name, chunk, lost_s)
            self._check_gone(name)
        self._check_trained()
        return longest / self.exposed_s

    def _check_durable(self, name: str, chunk: Decoded, lost_s: float) -> float:
        """Check that a chunk is in a shard in time; returns how long it was not, 0 if that is excused."""
        ledger, deadline_s = self.ledger, chunk.at_s + self.exposed_s
        written_s = self._written_s(name, chunk)
        ended_s, how = ledger.ends.get(name, (math.inf, ""))
        over_s = min(deadline_s, lost_s, ledger.created_at_s.get(layout.closed(ledger.iteration), math.inf))
        if written_s <= min(over_s, ended_s):
            return written_s - chunk.at_s
        if over_s < deadline_s or (ended_s <= deadline_s and how == KILLED):
            return 0.0
        if ledger.is_troubled(name, chunk.at_s - self.exposed_s, min(ended_s, deadline_s)):
            return 0.0
        what = f"{chunk.count} tokens of response {chunk.response}"
        if ended_s <= deadline_s:
            ledger.breaks(f"promise: {name} left ({how}) at {ended_s:.0f} s without {what} in its journal")
        else:
            ledger.breaks(
                f"promise: {name} kept {what} for more than {self.exposed_s:.0f} s from {chunk.at_s:.0f} s on"
            )
        return 0.0

    def _check_worth(self, name: str, chunk: Decoded, lost_s: float) -> None:
        """Check that decoding of a response stops after a claim by another member, and all decoding after `closed`."""
        closed_s = self.ledger.created_at_s.get(layout.closed(self.ledger.iteration), math.inf)
        since_s = min(lost_s, closed_s)
        if chunk.at_s <= since_s + self.unaware_s or self.ledger.is_troubled(name, since_s, chunk.at_s):
            return
        why = "another member had claimed it" if lost_s < closed_s else "the iteration was closed"
        late_s = chunk.at_s - since_s
        self.ledger.breaks(f"promise: {name} decoded response {chunk.response} {late_s:.0f} s after {why}")

    def _check_gone(self, name: str) -> None:
        """Check that no shard follows the heartbeat "gone", which frees the held responses for any member."""
        gone_s = next((beat.at_s for beat in self.ledger.beats.get(name, ()) if beat.state == "gone"), None)
        if gone_s is None:
            return
        times_s = {at_s for (who, _), rows in self.written.items() if who == name for at_s, _ in rows}
        for written_s in sorted(times_s):
            if written_s > gone_s and not self.ledger.is_troubled(name, gone_s - self.unaware_s, written_s):
                self.ledger.breaks(f"promise: {name} wrote a shard {written_s - gone_s:.1f} s after it said gone")

    def _check_trained(self) -> None:
        """Check that every life of the trainer used the micro-batches as they are recorded, and no other."""
        store = self.ledger.store
        for who, number, responses in self.ledger.used:
            key = layout.batch(self.ledger.iteration, number)
            recorded = {found.response for found in batch_of(key, store.get(key)).responses}
            if set(responses) != recorded:
                self.ledger.breaks(f"changed: {who} used other responses for batch {number} than are recorded")

    def _written_s(self, name: str, chunk: Decoded) -> float:
        """When the chunk reached the store; infinity if it never did."""
        for written_s, row in self.written.get((name, chunk.response), ()):
            if row.start <= chunk.start and chunk.start + chunk.count <= row.start + len(row.token_ids):
                return written_s
        return math.inf

    def _lost_s(self, name: str, chunk: Decoded) -> float:
        """When the next incarnation claimed the response after `name`; infinity if never.

        The claim of `name` is its last claim up to the moment at which its engine admitted the response.
        """
        owners = self.owners.get(chunk.response, ())
        own = [index for index, (at_s, who) in enumerate(owners) if who == name and at_s <= chunk.since_s]
        if not own or own[-1] + 1 == len(owners):
            return math.inf
        return owners[own[-1] + 1][0]


def ownership(ledger: Ledger, plan: PlanRecord) -> dict[int, list[tuple[float, str]]]:
    """For each response, when it got each of its owners, in that order (docs/format.md, algorithm O)."""
    owners: dict[int, list[tuple[float, str]]] = defaultdict(list)
    for claim in ledger.claims:
        for response in plan.responses_of(claim.unit) if claim.responses is None else claim.responses:
            before = owners[response]
            if not before or before[-1][1] in claim.sealed:
                before.append((claim.at_s, claim.incarnation))
    return owners
