"""The actions that a member's state machine asks for, and the events by which the machine learns the results.

A member does three things side by side. The DECODE lane drives the engine, the FLUSH lane writes tokens and heartbeats,
and the CLAIM lane reads and writes claims and looks for work. Each lane performs one action at a time.
"""

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Literal

from storage.journal.journal import PendingRows
from storage.records.crew_records import HeartbeatRecord
from tasks.crew_model.rebalance import Holder, Transfer
from tasks.sampling.engines.engine import TokenDelta


class Lane(Enum):
    """The sequences of actions that a member performs side by side."""

    DECODE = "decode"
    FLUSH = "flush"
    CLAIM = "claim"


@dataclass(frozen=True, kw_only=True)
class HeartbeatState:
    """The part of a heartbeat that changes; the fields are those of HeartbeatRecord."""

    state: Literal["loading", "working", "gone"]
    tokens_generated: int
    tokens_recovered: int
    responses_finished: int
    claims: int
    unfinished: int
    running: int
    waiting: int
    acting: int
    released: int
    plateau: int
    room: int
    working_at_s: float | None
    decode_s: float
    step_s: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class ClaimedResponse:
    """A response to extend from the end of `prefix`, under a claim of `epoch`.

    Attributes:
        response: the number of the response in the plan.
        epoch: the epoch of the claim.
        prefix: the token ids of the response so far.
        events: the stored answers to the turns of the policy, in a run with turns.
        turn_start: the position in `prefix` at which the policy's present turn began, or is to begin.
        owes: whether the policy has ended its present turn and the environment has not answered.
        restarts: the number of times that the response began again.
        logprobs: the log-probs of the tokens in `prefix` that the policy sampled, in a run with turns.
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
    """End the present rest of a lane, or the next rest of a lane at work. Result: none."""

    lane: Lane


@dataclass(frozen=True, slots=True)
class WriteShard:
    """Write these tokens as the next shard, after what an earlier write may have left unwritten."""

    pending: PendingRows


@dataclass(frozen=True, slots=True)
class WriteHeartbeat:
    """Overwrite the heartbeat."""

    heartbeat_state: HeartbeatState


# Actions of the decode lane.


@dataclass(frozen=True, slots=True)
class LoadWeights:
    """Give the engine the plan's weights. Result: True after loading, False when waiting for weights became useless."""


@dataclass(frozen=True, slots=True)
class RestartEngine:
    """Start the engine again after it died."""


@dataclass(frozen=True, slots=True)
class StartResponses:
    """Admit responses to the engine, given as pairs of a response's number and the tokens so far."""

    responses: tuple[tuple[int, tuple[int, ...]], ...]


@dataclass(frozen=True, slots=True)
class HeldTurn:
    """A turn that the policy has ended, of a held response; all other fields are as in OpenTurn.

    Attributes:
        journalled: whether the last tokens of the turn are in the journal.
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
    """Have the environments, and a living engine, forget responses.

    Attributes:
        responses: the numbers of the responses.
        engine_lives: whether the engine lives; a dead engine is not asked.
    """

    responses: tuple[int, ...]
    engine_lives: bool = True


@dataclass(frozen=True, slots=True)
class DecodeResult:
    """The result of DecodeStep.

    Attributes:
        deltas: the new tokens.
        took_s: the time of the engine's step.
    """

    deltas: list[TokenDelta]
    took_s: float


# Actions of the claim lane.


@dataclass(frozen=True, slots=True)
class ReadClosed:
    """Result: whether the iteration is closed."""


@dataclass(frozen=True, slots=True)
class ClaimSlot:
    """Claim the responses that the slot's earlier incarnations hold, and the unclaimed responses of the slot's unit.

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
    """Result: whether all responses of the slot's duty have ended (Claimant.own_unit_ended).

    None if journals were read in part: a repetition reads on. LookAround and Take behave alike.
    """

    claim_epochs: Mapping[int, int]
    cuts: bool
    has_cut: bool


@dataclass(frozen=True, slots=True)
class LookAround:
    """Read heartbeats of other members. Result: Seen or None. The fields are as in Claimant.look."""

    claim_epochs: Mapping[int, int]
    held: int
    released: int


@dataclass(frozen=True, slots=True)
class Take:
    """Claim the responses of a transfer. Result: Taken or None."""

    transfer: Transfer


@dataclass(frozen=True, slots=True)
class Taken:
    """The gain of a transfer; empty if another member came first.

    Attributes:
        work: the responses claimed.
        claims: the number of new claims.
        asked: the number of responses for which the holder was asked instead, now or by an earlier look.
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
    """The findings of one look.

    Attributes:
        stray: responses that an earlier, failed action claimed; with any stray response the look ends at once.
        holders: the members that may hold unfinished responses, by incarnation.
        unseen: the number of further such members, beyond the most that one look examines.
        unclaimed: the number of responses without a claim.
        nothing_left: whether every response of the plan was seen to have ended.
        working: the heartbeats of other crew members that decode.
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
    """The member's claims as read so far.

    Attributes:
        owned: the epoch of the member's claim by held response.
        made: the number of claims that the member has made.
        recovered: the number of the policy's tokens that the journal held in claimed responses when they were claimed.
    """

    owned: dict[int, int]
    made: int
    recovered: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """A lane has performed its action, or begins.

    Attributes:
        lane: the lane.
        now_s: the monotonic clock at the end of the action.
        wall_s: the wall clock at the end of the action.
        result: the result of the action, as the action's docstring says; None when a lane begins.
        claims: the claims as read so far; None: nothing new.
    """

    lane: Lane
    now_s: float
    wall_s: float = 0.0
    result: Any = None
    claims: Claims | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A lane's action raised `error`; all other fields are as in Done."""

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
# A lane: it yields actions, and is sent what came of each.
Steps = Generator[Action, Any, None]
