"""The ledger of seconds, tokens and dollars: one account per pool and iteration, whose parts add up to the whole.

Every second costs the pool's price, whatever its kind. Requests and egress come on top.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from resources.prices import dollars
from tasks.crew_model.flush_interval import GETS_PER_FLUSH

# The kinds of a machine's seconds. "useful" and "wasted" are decoding, divided by whether the tokens were kept;
# "idle" is waiting with a process, "standing" waiting without a process.
PARTS = ("starting", "process", "transfer", "prefill", "useful", "wasted", "idle", "train", "standing")
WITHOUT_PROCESS = ("starting", "standing")
NO_MACHINE = ("requests", "egress")
BYTES_PER_TOKEN = 8
_ROUNDING = 1e-6


@dataclass(slots=True)
class Life:
    """The seconds and tokens of one process in an iteration.

    Attributes:
        began_s: The start of the process.
        weight: The process's share of a machine; 1 for a whole machine, less for an engine beside further engines.
        worked_s: The time at which the weights were in place; None: never.
        ended_s: The end of the process; None while the process lives.
        decode_s: Machine seconds of decoding (seconds times weight).
        decoded: Tokens decoded.
        wasted: Tokens decoded and lost.
        prefill_tokens: Tokens prefilled.
        looks: Heartbeats of members read in looks for work.
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

    Attributes:
        pool: The name of the pool.
        usd_per_h: The price of a machine.
        gpus: GPUs of a machine.
        egress_usd_per_gb: Dollars per GB (1e9 bytes) read.
        put_usd: Dollars per PUT.
        get_usd: Dollars per GET.
        seconds: Machine seconds by part.
        lives: The processes of the pool.
        losses: Machines lost.
        bytes_read: Bytes read from the store.
        puts: PUT requests.
        gets: GET requests.
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
        """Divide the decoding of all lives into "useful" and "wasted" by tokens, and count the requests of the lives.

        A life flushes while decoding, beats until its end, and reads a heartbeat per member in a look.
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
        """Dollars by part of the seconds, and dollars of "requests" and "egress"."""
        spent = {part: dollars(duration_s, self.usd_per_h) for part, duration_s in self.seconds.items()}
        requests = self.puts * self.put_usd + self.gets * self.get_usd
        return spent | {"requests": requests, "egress": self.bytes_read / 1e9 * self.egress_usd_per_gb}


def mean_members(lives: Iterable[Life], from_s: float, to_s: float) -> float:
    """The mean number of processes with weights from `from_s` to `to_s`; 0 for an empty time."""
    if to_s <= from_s:
        return 0.0
    worked = (
        max(0.0, min(to_s, to_s if life.ended_s is None else life.ended_s) - max(from_s, life.worked_s))
        for life in lives
        if life.worked_s is not None
    )
    return sum(worked) / (to_s - from_s)
