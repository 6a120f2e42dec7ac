"""The state machine of one incarnation: `step(event)` returns the actions that follow, and does nothing else.

The machine has no store, engine, clock or thread: equal events give equal actions. A session drives the machine with a
thread for each lane, the crash histories in virtual time, and tests in one thread.
"""

from tasks.sampling.session.actions import (
    Action,
    Done,
    Event,
    Failed,
    Lane,
    Noticed,
    Rest,
    Steps,
    Wake,
    WriteHeartbeat,
    WriteShard,
)
from tasks.sampling.session.decode_lane import decode_lane
from tasks.sampling.session.state import State
from tasks.sampling.session.storage_lanes import ClaimLane, FlushLane


class StateMachine:
    """One incarnation's next actions. `state` may be read at any time between two steps."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._lanes: dict[Lane, Steps] = {
            Lane.DECODE: decode_lane(state),
            Lane.FLUSH: FlushLane(state).steps(),
            Lane.CLAIM: ClaimLane(state).steps(),
        }

    def step(self, event: Event) -> tuple[Action, ...]:
        """The next action of the event's lane, unless the lane has ended, and a Wake for each further lane with news.

        Raises the error that ends the decode lane (Preempted, EngineDied, a StorageError), and AssertionError when an
        invariant does not hold. The session has then ended. An error of a different lane is raised by the decode lane's
        next step.
        """
        state = self.state
        state.now_s = event.now_s
        was_leaving, hastened = state.leaving, frozenset(state.hastened)
        actions: tuple[Action, ...] = ()
        if isinstance(event, Noticed):
            state.noticed = True
            state.check()
        else:
            actions = self._advanced(event)
        return (*actions, *self._wakes(event, was_leaving, hastened))

    def _wakes(self, event: Event, was_leaving: bool, hastened: frozenset[Lane]) -> tuple[Wake, ...]:
        """Wake a resting decode lane for any news, and a resting storage lane if hastened or if the member leaves."""
        state = self.state
        resting = {lane for lane, action in state.doing.items() if isinstance(action, Rest)}
        if isinstance(event, Done | Failed):
            resting.discard(event.lane)
        if state.leaving == was_leaving:
            resting &= {Lane.DECODE} | (state.hastened - hastened)
        return tuple(Wake(lane) for lane in Lane if lane in resting)

    def _advanced(self, event: Done | Failed) -> tuple[Action, ...]:
        try:
            actions = self._advance(event)
            self.state.check()
        except Exception as error:
            if event.lane is Lane.DECODE:
                raise
            self.state.doing.pop(event.lane, None)
            self.state.error = error
            return ()
        return actions

    def _advance(self, event: Done | Failed) -> tuple[Action, ...]:
        state, lane = self.state, event.lane
        state.wall_s = event.wall_s
        state.doing.pop(lane, None)
        if event.claims is not None:
            state.see(event.claims)
        steps = self._lanes[lane]
        try:
            action = steps.throw(event.error) if isinstance(event, Failed) else steps.send(event.result)
        except StopIteration:
            return ()
        if lane is not Lane.DECODE and state.leaving:
            # A member that leaves begins no further duty.
            assert not isinstance(action, WriteShard), "tokens were taken for a shard that is not written"
            steps.close()
            return ()
        if isinstance(action, WriteShard | WriteHeartbeat):
            kinds = {type(other) for other in state.doing.values()}
            assert type(action) not in kinds, f"two lanes write at once: {type(action).__name__}"
        state.doing[lane] = action
        return (action,)
