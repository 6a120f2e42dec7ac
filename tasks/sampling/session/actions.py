"""What a member's state machine asks for (actions), and what it is told (events).

A member does three things side by side. The DECODE lane drives the engine, the FLUSH lane writes tokens and heartbeats,
and the CLAIM lane reads and writes claims and looks for work. Each lane performs one action at a time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from storage.journal.journal import PendingRows
from storage.records.crew_records import HeartbeatRecord
from tasks.crew_model.rebalance import Holder, Transfer
from tasks.sampling.engines.engine import TokenDelta
from tasks.sampling.session.heartbeat import HeartbeatState


class Lane(Enum):
    """The sequences of actions that a member performs side by side."""

    DECODE = "decode"
    FLUSH = "flush"
    CLAIM = "claim"


@dataclass(frozen=True, slots=True)
class ClaimedResponse:
    """A response to extend from the end of `prefix`, under a claim of `epoch`.

    logprobs: of the prefix's tokens that the policy sampled, in a run with turns. events: the answers to its turns.
    turn_start: where the present turn of the policy began, or is to begin. owes: the policy has ended that turn, and it
    is not answered. restarts: how often the response began again.
    """

    response: int
    epoch: int
    prefix: tuple[int, ...]
    events: tuple[bytes, ...] = ()
    turn_start: int = 0
    owes: bool = False
    restarts: int = 0
    logprobs: Sequence[float] = ()


# Actions of any lane: one that leaves writes from the decode lane, and the slot's claim follows the first heartbeat.


@dataclass(frozen=True, slots=True)
class Rest:
    """Wait until this moment of the member's monotonic clock, or until the lane is woken."""

    until_s: float


@dataclass(frozen=True, slots=True)
class Wake:
    """End the rest of a lane, or its next one if it does not rest now. It has no result."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class WriteShard:
    """Write these tokens as the next shard, after what an earlier write may have left unwritten."""

    pending: PendingRows


@dataclass(frozen=True, slots=True)
class WriteHeartbeat:
    """Overwrite the heartbeat."""

    vitals: HeartbeatState


# Actions of the decode lane.


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Give the engine the plan's weights. Result: whether they were loaded, or waiting for them became useless."""


@dataclass(frozen=True, slots=True)
class RestartEngine:
    """Start the engine again after it died."""


@dataclass(frozen=True, slots=True)
class StartResponses:
    """Admit responses to the engine, each with the tokens that it has so far."""

    responses: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """A turn that the policy has ended, of a response that is held; the fields are those of OpenTurn.

    journalled: whether its last tokens are in the journal.
    """

    response: int
    epoch: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    events: tuple[bytes, ...]
    turn_start: int
    unknown: bool
    restarts: int
    journalled: bool


@dataclass(frozen=True, slots=True)
class BeginTurns:
    """Have turns answered, but those with side effects only if they are journalled.

    Result: the responses, as a set, whose turns have side effects.
    """

    turns: tuple[HeldTurn, ...]


@dataclass(frozen=True, slots=True)
class TakeAnswers:
    """Result: the list of new answers to turns, after waiting up to `wait_s` for one."""

    wait_s: float


@dataclass(frozen=True, slots=True)
class DecodeStep:
    """Wait for new tokens. Result: DecodeResult."""


@dataclass(frozen=True, slots=True)
class AbortResponses:
    """Have the environments, and an engine that lives, forget responses."""

    responses: tuple[int, ...]
    engine_lives: bool = True


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The new tokens, and how long the engine took for them."""

    deltas: list[TokenDelta]
    took_s: float


# Actions of the claim lane.


@dataclass(frozen=True, slots=True)
class ReadClosed:
    """Result: whether the iteration is closed."""


@dataclass(frozen=True, slots=True)
class ClaimSlot:
    """Claim what the slot's earlier incarnations hold, and what is unclaimed in its unit.

    Result: tuple of ClaimedResponse.
    """


@dataclass(frozen=True, slots=True)
class ProbeClaims:
    """Read new claims on the units of these responses."""

    responses: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ReadClaims:
    """Read all new claims."""


@dataclass(frozen=True, slots=True)
class ReadOwnUnit:
    """Result: whether the responses have ended that the slot is responsible for (Claimant.own_unit_ended).

    None if journals were read in part: asked again, it reads on. So do LookAround and Take.
    """

    known: Mapping[int, int]
    cuts: bool
    has_cut: bool


@dataclass(frozen=True, slots=True)
class LookAround:
    """Read heartbeats of other members. Result: Seen or None. The fields are those of Claimant.look."""

    known: Mapping[int, int]
    held: int
    released: int


@dataclass(frozen=True, slots=True)
class Take:
    """Claim the responses of a transfer. Result: Taken or None."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Taken:
    """What a transfer brought, by how many new claims; nothing if another member came first.

    asked: how many responses their holder was asked for instead, now or by an earlier look.
    """

    work: tuple[ClaimedResponse, ...] = ()
    claims: int = 0
    asked: int = 0


@dataclass(frozen=True, slots=True)
class ReadAsks:
    """Result: the responses that this member was asked for."""


@dataclass(frozen=True, slots=True)
class AskEnough:
    """Result: whether a member may leave once its time limit has passed or, if it stands, when it holds nothing."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What a look shows.

    stray: responses that an earlier, failed action claimed; if there are any, nothing else was looked at. holders: the
    members that may hold unfinished responses, by incarnation. unseen: how many more such members there are, beyond
    those that one look looks at. unclaimed: how many responses have no claim. nothing_left: every response of the plan
    was seen to have ended. working: the heartbeats of other crew members that decode.
    """

    stray: tuple[ClaimedResponse, ...] = ()
    holders: Mapping[str, Holder] = field(default_factory=dict)
    unseen: int = 0
    unclaimed: int = 0
    nothing_left: bool = False
    working: tuple[HeartbeatRecord, ...] = ()


Action = (
    Rest
    | Wake
    | WriteShard
    | WriteHeartbeat
    | LoadWeights
    | RestartEngine
    | StartResponses
    | BeginTurns
    | TakeAnswers
    | DecodeStep
    | AbortResponses
    | ReadClosed
    | ClaimSlot
    | ProbeClaims
    | ReadClaims
    | ReadOwnUnit
    | LookAround
    | Take
    | ReadAsks
    | AskEnough
)


# Events. `now_s` and `wall_s` are the member's monotonic clock and its machine's wall clock.


@dataclass(frozen=True, slots=True)
class Claims:
    """The claims as read so far: the responses that the member holds, with epochs, and how many claims it has made.

    recovered: how many tokens of the policy it found journalled in the responses that it claimed.
    """

    owned: dict[int, int]
    made: int
    recovered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A lane has performed its action, or begins (result None). claims: what it read of them; None: nothing new."""

    lane: Lane
    now_s: float
    wall_s: float = 0.0
    result: Any = None
    claims: Claims | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A lane's action raised `error`; claims: as in Done."""

    lane: Lane
    now_s: float
    wall_s: float = 0.0
    error: Exception
    claims: Claims | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Noticed:
    """The machine is wanted back."""

    now_s: float


Event = Done | Failed | Noticed
