"""The state machine of one incarnation: `step(event)` returns the actions that follow, and does nothing else.

It has no store, engine, clock or thread: the same events give the same actions. A session drives it with two threads;
the crash histories drive it in virtual time, tests in one thread.
"""

from tasks.sampling.session.actions import Action, Done, Event, Failed, HandOver, Lane, Noticed, Rest, Wake, WriteShard
from tasks.sampling.session.decode_lane import Steps, decode_lane
from tasks.sampling.session.state import State
from tasks.sampling.session.storage_lane import StorageLane


class StateMachine:
    """One incarnation's next actions. `state` may be read at any time between two steps."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._lanes: dict[Lane, Steps] = {
            Lane.DECODE: decode_lane(state),
            Lane.STORAGE: StorageLane(state).steps(),
        }

    def step(self, event: Event) -> tuple[Action, ...]:
        """The lane's next action, if it has not ended, and a Wake for the other lane if there is news for it.

        Raises what ended the decode lane (Preempted, EngineDied, a StorageError), and AssertionError when an invariant
        does not hold. The session has then ended. What ends the storage lane is raised by the decode lane's next step.
        """
        state = self.state
        state.now_s = event.now_s
        before = (state.leaving, state.is_hastened)
        actions: tuple[Action, ...] = ()
        if isinstance(event, Noticed):
            state.noticed = True
        elif isinstance(event, HandOver):
            state.asked_for.update(event.responses)
            state.check()
        else:
            actions = self._advanced(event)
        return (*actions, *self._wakes(event, before))

    def _wakes(self, event: Event, before: tuple[bool, bool]) -> tuple[Wake, ...]:
        """Wake a resting lane when there is news for it from outside or from the other lane."""
        state = self.state
        resting = {lane for lane, action in state.doing.items() if isinstance(action, Rest)}
        if isinstance(event, Done | Failed):
            resting.discard(event.lane)
        if (state.leaving, state.is_hastened) == before:
            resting.discard(Lane.STORAGE)
        return tuple(Wake(lane) for lane in Lane if lane in resting)

    def _advanced(self, event: Done | Failed) -> tuple[Action, ...]:
        try:
            actions = self._advance(event)
            self.state.check()
        except Exception as error:
            if event.lane is Lane.DECODE:
                raise
            self.state.doing.pop(Lane.STORAGE, None)
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
        if lane is Lane.STORAGE and state.leaving:
            # A member that leaves begins no further duty.
            assert not isinstance(action, WriteShard), "tokens were taken for a shard that is not written"
            steps.close()
            return ()
        other = state.doing.get(Lane.STORAGE if lane is Lane.DECODE else Lane.DECODE)
        assert not (isinstance(action, WriteShard) and isinstance(other, WriteShard)), "two shards are written at once"
        state.doing[lane] = action
        return (action,)
