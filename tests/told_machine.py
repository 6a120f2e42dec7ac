"""A state machine that a test tells what came of its actions."""

from tasks.sampling.engines.engine import TokenDelta
from tasks.sampling.session.actions import (
    ClaimedResponse,
    Claims,
    ClaimSlot,
    DecodeResult,
    DecodeStep,
    Done,
    Failed,
    Lane,
    LoadWeights,
    ReadClosed,
    Rest,
    StartResponses,
    Wake,
    WriteHeartbeat,
)
from tasks.sampling.session.session_config import SessionConfig
from tasks.sampling.session.session_outcome import EngineHealth
from tasks.sampling.session.state import State
from tasks.sampling.session.state_machine import StateMachine
from tests.sessions import IN_FLIGHT, a_plan

CONFIG = SessionConfig(
    slot=0,
    pool="rollout",
    host="here",
    pid=1,
    flush_interval_s=2.0,
    heartbeat_interval_s=4.0,
    claim_ttl_s=12.0,
    idle_timeout_s=30.0,
    engine_restarts_max=1,
)
OWN = a_plan().responses_of(0)


def a_state(incarnation, config):
    return State(
        a_plan(), incarnation, config, engine_max=IN_FLIGHT, asks_enough=False, health=EngineHealth(), now_s=0.0
    )


class Told:
    """A state machine and the moment; `tell` gives it what came of a lane's action, and returns what follows."""

    def __init__(self, config: SessionConfig = CONFIG) -> None:
        self.machine = StateMachine(a_state("00000-a", config))
        self.now_s = 0.0
        self.woken = 0
        self.state = self.machine.state

    def tell(self, lane, result=None, claims=None):
        return self._step(Done(lane=lane, now_s=self.now_s, result=result, claims=claims))

    def fail(self, lane, error):
        return self._step(Failed(lane=lane, now_s=self.now_s, error=error))

    def _step(self, event):
        """The actions but for those that wake the decode lane, which `woken` counts."""
        actions = self.machine.step(event)
        others = tuple(action for action in actions if action != Wake(Lane.DECODE))
        self.woken += len(actions) - len(others)
        return others

    def claimed(self):
        """The slot is claimed; the other lanes rest, and the decode lane was woken."""
        assert isinstance(self.tell(Lane.DECODE)[0], Rest)
        assert self.tell(Lane.FLUSH) == (Rest(2.0),)
        assert self.tell(Lane.CLAIM) == (ReadClosed(),)
        assert isinstance(self.tell(Lane.CLAIM, False)[0], WriteHeartbeat)
        assert self.tell(Lane.CLAIM)[0] == ClaimSlot()
        work = tuple(ClaimedResponse(response, 1, ()) for response in OWN)
        assert self.tell(Lane.CLAIM, work, Claims(dict.fromkeys(OWN, 1), 1, 0)) == (ReadClosed(),)
        assert self.tell(Lane.CLAIM, False) == (Rest(4.0),)
        assert self.woken
        return self

    def decoding(self):
        """The engine has the weights and four responses."""
        assert self.tell(Lane.DECODE) == (LoadWeights(),)
        start, wake = self.tell(Lane.DECODE, True)
        assert start == StartResponses(tuple((response, ()) for response in OWN[:IN_FLIGHT]))
        assert wake == Wake(Lane.FLUSH)  # the others learn at once that it works
        assert self.tell(Lane.DECODE) == (DecodeStep(),)
        return self

    def decoded(self, *tokens, finish=None):
        """Each response in flight has got these tokens."""
        deltas = [TokenDelta(r, tokens, (-1.0,) * len(tokens), finish) for r in sorted(self.state.holdings.in_flight)]
        return self.tell(Lane.DECODE, DecodeResult(deltas, 1.0))
