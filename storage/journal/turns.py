"""The answer of an environment to a turn of the policy: the event of an observation row (docs/format.md section 4)."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from pydantic import ConfigDict, JsonValue, TypeAdapter, ValidationError

from storage.digests import digest_of

STATE_BYTES_MAX = 64 << 10
STRICT = ConfigDict(extra="forbid", strict=True)
Outcome = Literal["answered", "raised", "invalid", "timed_out", "lost"]

Rebuilt = Literal["kept", "new", "state", "restored", "replayed"]


@dataclass(frozen=True, kw_only=True)
class CallRecord:
    """One call of a turn.

    Attributes:
        call_id: the same for every repetition of the call in any process, for tools to recognise a repetition.
        arguments: a JSON object by parameter name, or the policy's text if the text is no JSON object.
        result: the text that the policy reads.
        outcome: "answered"; "raised" an error; "invalid": nothing was called, because the tool is unknown or the
            arguments do not fit; "timed_out"; "lost": the tool's process ended during the call.
        unknown: an earlier process may have made the call, and its answer is not journalled.
        seconds: duration of the call.
    """

    __pydantic_config__ = STRICT
    call_id: str
    name: str
    arguments: JsonValue
    result: str
    outcome: Outcome
    unknown: bool
    seconds: float


@dataclass(frozen=True, kw_only=True)
class TurnRecord:
    """The answer to a turn of the policy.

    Attributes:
        turn: number of the turn in the response, from 0.
        seconds: duration of the whole answer, rebuilding included.
        reward: result of the environment's get_reward; on the last turn only, None without get_reward.
        state: result of its get_state after the turn, at most STATE_BYTES_MAX as JSON; None without get_state, and if
            `state_object` names the object that holds the state.
        failure: why the environment is lost, or why the response begins again; None if neither.
        rebuilt: how the environment came about in this process: "kept" from the turn before, "new" for a first turn,
            else the method of rebuilding.
        diverged: a rebuilt environment did not answer as recorded, or an agent sent another request.
        messages: chat messages that the next request of an agent added, the observation; None without an agent and at
            the agent's end.
    """

    __pydantic_config__ = STRICT
    turn: int
    calls: tuple[CallRecord, ...]
    seconds: float
    reward: float | None = None
    state: JsonValue = None
    state_object: str | None = None
    failure: str | None = None
    rebuilt: Rebuilt = "kept"
    diverged: bool = False
    messages: JsonValue = None


_TURN = TypeAdapter(TurnRecord)
_MESSAGES: TypeAdapter[list[dict[str, Any]]] = TypeAdapter(list[dict[str, str]], config=ConfigDict(strict=True))


def encode_turn(record: TurnRecord) -> bytes:
    """The record as the bytes of an event: JSON with all fields, keys sorted, no white space, ASCII."""
    return json.dumps(asdict(record), sort_keys=True, separators=(",", ":")).encode()


def decode_turn(event: bytes) -> TurnRecord:
    """The record in an event; raises ValueError for bytes that are none."""
    try:
        return _TURN.validate_json(event)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(map(str, first["loc"])) or "it"
        raise ValueError(f"no record of a turn: {place}: {first['msg']}") from None


def added_messages(record: TurnRecord) -> list[dict[str, Any]]:
    """The messages that an agent added after a turn; raises ValueError if they are none."""
    try:
        return _MESSAGES.validate_python(record.messages or [])
    except ValidationError:
        raise ValueError("no record of an agent's turn: its messages are none") from None


def call_id(run_seed: int, iteration: int, response: int, turn: int, index: int) -> str:
    """The name of a call, by which a tool recognises it when it is made again (32 hexadecimal digits)."""
    return digest_of(f"{run_seed}/{iteration}/{response}/{turn}/{index}".encode())
