"""Session: an incarnation of a slot, from the first claim to the last flush.

A session claims its slot's responses, resumes each response at the token where the journal ends, decodes, and takes
over responses of other members when none of its own is left. If the engine dies, the session restarts the engine and
continues each response where decoding stopped. A state machine decides every action. The session performs each lane in
a thread of its own, so that the engine waits for no storage, and a flush for nothing else. Flyte and training are
unknown here.
"""

import threading
import uuid
from collections.abc import Callable, Sequence

from storage.clock import Clock
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.stores.store import ObjectStore
from tasks.sampling.engines.engine import Engine
from tasks.sampling.session.actions import Action, Done, Event, Lane, Noticed, Rest, Wake
from tasks.sampling.session.draft_corpus import DraftCorpus
from tasks.sampling.session.performer import Load, Performer
from tasks.sampling.session.session_config import SessionConfig
from tasks.sampling.session.session_outcome import EngineHealth, SessionOutcome
from tasks.sampling.session.state import State
from tasks.sampling.session.state_machine import StateMachine
from tasks.turns.environments import Environments

# The lanes that begin beside the decode lane.
BESIDE = (Lane.FLUSH, Lane.CLAIM)


class Session:
    """Drives an engine over the responses of a slot, and of other slots that need help, until `run` returns.

    The crash histories replace `rest`, `wake` and `start` by those of virtual time.
    """

    def __init__(
        self,
        store: ObjectStore,
        plan: PlanRecord,
        *,
        prompts: Sequence[PromptRow],
        engine: Engine,
        load: Load,
        config: SessionConfig,
        clock: Clock,
        notice: Callable[[], bool],
        environments: Environments | None = None,
        incarnation: str | None = None,
        health: EngineHealth | None = None,
        enough: Callable[[], bool] | None = None,
        corpus: DraftCorpus | None = None,
    ) -> None:
        """Create a session that has claimed nothing yet.

        Args:
            store: the store of the run.
            plan: the plan of the iteration.
            prompts: the rows of the plan's prompts, by group.
            engine: the engine, with any weights or none.
            load: gives the engine the plan's weights, as soon as there is something to decode. Its second argument is a
                function to call now and then during a wait, which raises when the wait has become useless.
            config: the slot, names and intervals.
            clock: the clock of the process, or of virtual time.
            notice: whether the machine is wanted back; called before every action of the decode lane.
            environments: the answers to the policy's turns; None in a run without turns.
            incarnation: a name never used before; by default a random name.
            health: the health of the engine, kept up to date for later sessions on the engine. None: the engine lives,
                and serves only this session.
            enough: after time_limit_s, or when a standing member holds nothing, the session ends only when `enough`
                returns True. The claim lane calls `enough` once per heartbeat interval, so reading the store is fine.
            corpus: responses from which the engine drafts; None: others' responses are not handed to the engine.
        """
        self.incarnation = incarnation or f"{config.slot:05d}-{uuid.uuid4().hex[:16]}"
        self.clock = clock
        self._notice = notice
        self.state = State(
            plan,
            self.incarnation,
            config,
            engine_max=engine.max_responses_in_flight,
            asks_enough=enough is not None,
            has_turns=environments is not None,
            health=health or EngineHealth(),
            now_s=clock.monotonic(),
        )
        self._machine = StateMachine(self.state)
        self._performer = Performer(
            store,
            plan,
            self.incarnation,
            prompts=prompts,
            engine=engine,
            load=load,
            config=config,
            clock=clock,
            environments=environments,
            enough=enough,
            is_useless=lambda: notice() or self.state.needs_no_weights,
            corpus=corpus,
        )
        self._stepping = threading.Lock()
        self._woken = {lane: threading.Event() for lane in Lane}
        self._is_over = False
        # What came of each lane's last action; None: it rested. A lane that has ended is missing.
        self._events: dict[Lane, Event | None] = dict.fromkeys(Lane)

    def run(self) -> SessionOutcome:
        """Claim and decode the slot's responses, then help other slots until none is left or the iteration closes.

        Raises Preempted after a notice, EngineDied when the engine dies after engine_restarts_max restarts, and
        StoreUnavailable when the store does not answer for long.
        """
        self._heed_notice()
        if not self.state.noticed:
            for lane in BESIDE:
                self.start(lane)
        try:
            while self.turn(Lane.DECODE):
                pass
        finally:
            # After an orderly end the other lanes have ended; after any other, they end with their next actions.
            self._is_over = True
            for lane in BESIDE:
                self.wake(lane)
        return self.outcome()

    def turn(self, lane: Lane) -> bool:
        """Perform the lane's next action; False if it has none any more. Raises what ends the session."""
        if lane is Lane.DECODE:
            self._heed_notice()
        # The event is not kept while the action runs: its error would keep tensors on the device alive.
        action = self._tell(self._events.pop(lane) or self._done(lane))
        if action is None:
            return False
        if isinstance(action, Rest):
            self.rest(lane, action.until_s)
            self._events[lane] = None
        else:
            self._events[lane] = self._performer.perform(lane, action)
        return True

    def rest(self, lane: Lane, until_s: float) -> None:
        """Let the lane wait until this moment of the clock, or until `wake` is called, even if that was before."""
        self._woken[lane].wait(max(0.0, until_s - self.clock.monotonic()))
        self._woken[lane].clear()

    def wake(self, lane: Lane) -> None:
        """End a lane's rest."""
        self._woken[lane].set()

    def start(self, lane: Lane) -> None:
        """Begin to perform the lane's actions beside those of the decode lane."""
        threading.Thread(target=self.perform_all, args=(lane,), name=f"{lane.value} lane", daemon=True).start()

    def perform_all(self, lane: Lane) -> None:
        """Perform the lane's actions until it ends."""
        while not self._is_over and self.turn(lane):
            pass

    def outcome(self) -> SessionOutcome:
        """What the incarnation has done so far."""
        return self.state.outcome()

    def _heed_notice(self) -> None:
        if not self.state.noticed and self._notice():
            self._tell(Noticed(now_s=self.clock.monotonic()))

    def _done(self, lane: Lane) -> Done:
        return Done(lane=lane, now_s=self.clock.monotonic(), wall_s=self.clock.wall())

    def _tell(self, event: Event) -> Action | None:
        """Step the machine; returns the next action of the event's lane, if there is one."""
        with self._stepping:
            actions = self._machine.step(event)
        following = None
        for action in actions:
            if isinstance(action, Wake):
                self.wake(action.lane)
            else:
                following = action
        return following
