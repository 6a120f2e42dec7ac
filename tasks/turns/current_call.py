"""The current call of a tool, readable inside the tool, so that the tool's signature need not change."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The call that is being made.

    Attributes:
        call_id: the id of the call. Any process that repeats the call has an equal id, so a server can repeat its
            answer.
        epoch: the epoch of the claim under which the caller holds the response. A server that has seen a later epoch
            of the response can refuse the call, because the caller has lost the response.
        iteration: the iteration of the response.
        response: the number of the response in the plan.
    """

    call_id: str
    epoch: int
    iteration: int
    response: int


CALL: ContextVar[CurrentCall] = ContextVar("call")


def current_call() -> CurrentCall:
    """The call in which the caller's code runs, in coroutines too; raises LookupError outside of a call."""
    try:
        return CALL.get()
    except LookupError:
        raise LookupError("no tool is being called here") from None
