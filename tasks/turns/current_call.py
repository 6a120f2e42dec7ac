"""Which call of a tool is being made: what a tool may read beside its arguments, so that signatures need not change."""

from contextvars import ContextVar
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CurrentCall:
    """The call that is being made.

    call_id: equal whenever this call is made again, whichever process makes it: a server that has answered it once can
    give the same answer. epoch: of the claim under which the caller holds the response; a server that has seen a later
    epoch of the same response can refuse this one, because its caller has lost the response.
    """

    call_id: str
    epoch: int
    iteration: int
    response: int


CALL: ContextVar[CurrentCall] = ContextVar("call")


def current_call() -> CurrentCall:
    """The call in which this code runs, in coroutines too; raises LookupError outside of one."""
    try:
        return CALL.get()
    except LookupError:
        raise LookupError("no tool is being called here") from None
