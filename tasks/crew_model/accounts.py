"""The ledger of seconds, tokens and dollars: one account per pool and iteration, whose parts add up to the whole.

A second costs the pool's price, whatever it was spent on. Requests and egress come on top.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from resources.prices import dollars
from tasks.crew_model.flush_interval import GETS_PER_FLUSH

# What a second of a machine is spent on. "useful" and "wasted" are decoding, divided by what became of the tokens;
# "idle" is waiting with a process, "standing" without one.
PARTS = ("starting", "process", "transfer", "prefill", "useful", "wasted", "idle", "train", "standing")
WITHOUT_PROCESS = ("starting", "standing")
NO_MACHINE = ("requests", "egress")
BYTES_PER_TOKEN = 8
_ROUNDING = 1e-6


@dataclass(slots=True)
class Life:
    """The seconds and tokens of one process in an iteration.

    worked_s: when it got the weights; None: never. weight: its share of the pool's machine; an engine beside others on
    the trainer's machines is a part of them.
    """

    began_s: float
    weight: float = 1.0
    worked_s: float | None = None
    ended_s: float | None = None
    decode_s: float = 0.0
    decoded: float = 0.0
    wasted: float = 0.0
    prefill_tokens: float = 0.0
    looks: int = 0


@dataclass(slots=True)
class Account:
    """The account of one pool in one iteration; seconds of decoding stay in the lives until `close`.

    put_usd, get_usd: dollars per request to the store.
    """

    pool: str
    usd_per_h: float
    gpus: float
    egress_usd_per_gb: float = 0.0
    put_usd: float = 0.0
    get_usd: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    lives: list[Life] = field(default_factory=list)
    losses: int = 0
    bytes_read: float = 0.0
    puts: float = 0.0
    gets: float = 0.0

    def add(self, part: str, duration_s: float) -> None:
        self.seconds[part] += duration_s

    def close(self, now_s: float, flush_interval_s: float, heartbeat_interval_s: float) -> None:
        """Divide the decoding of all lives by what became of the tokens, and count their requests.

        A life flushes while it decodes, beats until it ends, and reads one heartbeat per member it looks at.
        """
        for life in self.lives:
            assert life.wasted <= life.decoded * (1 + _ROUNDING) + _ROUNDING, (
                f"{self.pool}: more was wasted than decoded"
            )
            share = life.wasted / life.decoded if life.decoded else 0.0
            self.seconds["wasted"] += life.decode_s * share
            self.seconds["useful"] += life.decode_s * (1 - share)
            flushes = life.decode_s / life.weight / flush_interval_s
            ended_s = now_s if life.ended_s is None else life.ended_s
            self.puts += flushes + (ended_s - life.began_s) / heartbeat_interval_s
            self.gets += flushes * GETS_PER_FLUSH + life.looks
        assert min(self.seconds.values()) >= -_ROUNDING, f"{self.pool}: negative seconds in {self.seconds}"

    @property
    def machine_s(self) -> float:
        return sum(self.seconds.values())

    @property
    def decoded(self) -> float:
        return sum(life.decoded for life in self.lives)

    @property
    def wasted(self) -> float:
        return sum(life.wasted for life in self.lives)

    def usd(self) -> dict[str, float]:
        """Dollars by what the seconds were spent on, and those of requests and egress."""
        spent = {part: dollars(duration_s, self.usd_per_h) for part, duration_s in self.seconds.items()}
        requests = self.puts * self.put_usd + self.gets * self.get_usd
        return spent | {"requests": requests, "egress": self.bytes_read / 1e9 * self.egress_usd_per_gb}


def mean_members(lives: Iterable[Life], from_s: float, to_s: float) -> float:
    """How many of these processes had the weights, on average over the time; 0 for an empty time."""
    if to_s <= from_s:
        return 0.0
    worked = (
        max(0.0, min(to_s, to_s if life.ended_s is None else life.ended_s) - max(from_s, life.worked_s))
        for life in lives
        if life.worked_s is not None
    )
    return sum(worked) / (to_s - from_s)
