"""Members of a simulated crew: production sessions on simulated engines, also the one in the trainer's own process.

The module checks that a leaving member may leave. It knows neither faults nor Flyte.
"""

import math
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from simulation.ledger import Ledger
from simulation.simulated_history import VOCABULARY, History
from simulation.simulated_machine import HangingEngine
from simulation.simulated_session import Machine, SimulatedSession
from simulation.undisturbed import prompt
from simulation.virtual_time import Process
from storage.clock import Clock
from storage.journal.assembly import JournalReader
from storage.records import layout
from storage.records.records import JOINED_POOL, TRAIN_POOL
from storage.records.run import exists
from storage.stores.store import CorruptObject, ObjectMissing, ObjectStore
from storage.weights.tensor_sets import TensorBlock
from storage.weights.versions import pull_version
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rollout import RolloutConfig
from tasks.sampling.engines.engine import Engine
from tasks.sampling.session.crew_watch import CrewWatch
from tasks.sampling.session.member import helping_slot
from tasks.sampling.session.session_config import SessionConfig
from tasks.sampling.session.session_outcome import EngineHealth, SessionOutcome
from tasks.turns.scripted_environments import ScriptedEnvironments

EXECUTION = "simulated"
LOAD_PARTS = 4


def new_watch(history: History, store: ObjectStore, clock: Clock, *, at_once: bool = True) -> CrewWatch:
    """The production watch on all members but the trainer's machine, for histories in which members may be absent."""
    if history.absence is None:
        raise ValueError("absence: None; allowed: only histories in which the trainer's machine generates again")
    return CrewWatch(
        store,
        history.plan,
        RolloutConfig(claim_ttl_s=history.claim_ttl_s, flush_interval_s=history.heartbeat_interval_s),
        PlanningConfig(seeding="auto"),
        clock,
        execution=EXECUTION,
        at_once=at_once,
        seeding_after_s=history.absence.seeding_after_s,
        parallel_reads=1,
    )


class Members:
    """Runs the lives of members. store: gives a process its store under a name. now_s: true time."""

    def __init__(
        self,
        history: History,
        ledger: Ledger,
        counts: Counter[str],
        now_s: Callable[[], float],
        store: Callable[[Machine, str], ObjectStore],
    ) -> None:
        self.engines: dict[int, HangingEngine] = {}
        self._history = history
        self._ledger = ledger
        self._counts = counts
        self._now_s = now_s
        self._store = store

    def live(self, process: Machine, member: int, has_notice: Callable[[], bool]) -> None:
        """Run one life of a member, from its first claim on; its process has the incarnation's name."""
        history = self._history
        rng = random.Random(f"member {history.seed} {process.name}")

        store = self._store(process, process.name)
        enough = None
        if history.pool(member) == TRAIN_POOL and history.absence is not None:
            enough = new_watch(history, store, process.clock).lives
        engine = self.engines[member] = self._new_engine(process, process.name, member)
        config = self._session_config(process, member)
        session = self._session(process, process.name, store, engine, config, rng, has_notice, enough)
        try:
            session.run()
        except (ObjectMissing, CorruptObject):
            # As in `run_session`: retention may be deleting what it reads.
            if not exists(store, layout.closed(history.plan.iteration)):
                raise
        self._check_threads(process.threads, process.name)
        self._check_unit(process, member)

    def help_out(self, process: Machine, trainers_store: ObjectStore, rng: random.Random) -> SessionOutcome:
        """Generate in the trainer's process, like `seed_again` in tasks/sampling/session/seeding_member.py."""
        history, slot = self._history, helping_slot(trainers_store, self._history.plan)
        name = f"{slot:05d}-{rng.getrandbits(64):016x}"
        self._counts["the trainer's machine generates"] += 1
        self._ledger.tell(process.name, f"generates as {name}")
        store = self._store(process, name)
        watch = new_watch(history, store, process.clock)
        process.clock.sleep(rng.uniform(*history.cold_start_s))  # until the engine has started
        engine = self._new_engine(process, name, None)
        config = self._session_config(process, slot, helps_out=True)
        has_handed_over = False

        def enough() -> bool:
            nonlocal has_handed_over
            has_handed_over = watch.works()
            return has_handed_over

        session = self._session(process, name, store, engine, config, rng, lambda: False, enough)
        others = len(process.threads)
        try:
            outcome = session.run()
        except BaseException as error:
            self._counts[f"the trainer's machine ended while it generated: {type(error).__name__}"] += 1
            self._ledger.ends[name] = self._now_s(), type(error).__name__
            raise
        self._ledger.ends[name] = self._now_s(), "done"
        self._check_threads(process.threads[others:], name)
        self._counts["the trainer's machine hands over"] += has_handed_over
        self._ledger.tell(process.name, f"has generated {outcome.tokens_generated} tokens as {name}")
        return outcome

    def stand_in(
        self,
        process: Machine,
        number: int,
        slot: int,
        engine: HangingEngine,
        rng: random.Random,
        notice: Callable[[], bool],
        enough: Callable[[], bool] | None,
        *,
        health: EngineHealth,
    ) -> SessionOutcome:
        """One session of a standing member, which is `number` among the iteration's processes, in a slot.

        enough: None in the last iteration, which the member leaves like a member of the slot.
        """
        name = f"{slot:05d}-{rng.getrandbits(64):016x}"
        self._counts["sessions of standing members"] += 1
        self._ledger.tell(process.name, f"works as {name}")
        store = self._store(process, name)
        engine.enter(self._history, slot, self._dying(name), self._ledger, name)
        self.engines[number] = engine
        config = self._session_config(process, slot, stands=enough is not None, in_standing_crew=True)
        session = self._session(process, name, store, engine, config, rng, notice, enough, health=health)
        others = len(process.threads)
        try:
            session.run()
        except (ObjectMissing, CorruptObject):
            if not exists(store, layout.closed(self._history.plan.iteration)):
                raise
        except BaseException as error:
            self._ledger.ends[name] = self._now_s(), type(error).__name__
            raise
        self._ledger.ends[name] = self._now_s(), "done"
        self._check_threads(process.threads[others:], name)
        if enough is None:
            self._check_unit(process, slot)
        return session.outcome()

    def _session(
        self,
        process: Machine,
        name: str,
        store: ObjectStore,
        engine: HangingEngine,
        config: SessionConfig,
        rng: random.Random,
        notice: Callable[[], bool],
        enough: Callable[[], bool] | None,
        *,
        health: EngineHealth | None = None,
    ) -> SimulatedSession:
        history = self._history

        def load(into: Engine, heed: Callable[[], None]) -> None:
            for _ in range(LOAD_PARTS):
                heed()
                process.clock.sleep(rng.uniform(*history.cold_start_s) / LOAD_PARTS)
            version = history.plan.weight_version
            tensors: Mapping[str, TensorBlock] = {}
            if history.iterations > 1:
                _, tensors = pull_version(store, version, None, process.clock, check=heed)
            into.load_weights(version, tensors)

        environments = None
        if history.script is not None:
            server = self._ledger.server
            environments = ScriptedEnvironments(history.script, server, process.clock, VOCABULARY)
        return SimulatedSession(
            process,
            store,
            history.plan,
            environments=environments,
            prompts=[prompt(group) for group in range(history.plan.num_groups)],
            engine=engine,
            load=load,
            config=config,
            notice=notice,
            incarnation=name,
            enough=enough,
            health=health,
        )

    def _new_engine(self, process: Machine, name: str, member: int | None) -> HangingEngine:
        version = self._history.plan.weight_version
        joins = member is not None and self._history.pool(member) == JOINED_POOL
        holds = version - 1 if joins and version else None
        return HangingEngine(self._history, member, process.clock, self._dying(name), self._ledger, name, holds)

    def _dying(self, name: str) -> Callable[[float], bool]:
        """Whether the engine of this incarnation dies now, with a probability."""
        rng = random.Random(f"engine {self._history.seed} {name}")

        def dies(probability: float) -> bool:
            if rng.random() >= probability or self._now_s() >= self._history.calm_at_s:
                return False
            self._counts["engine deaths"] += 1
            self._ledger.tell(name, "its engine dies")
            self._ledger.note_fault()
            return True

        return dies

    def _session_config(
        self,
        process: Machine,
        slot: int,
        *,
        helps_out: bool = False,
        in_standing_crew: bool = False,
        stands: bool = False,
    ) -> SessionConfig:
        """helps_out: it is the trainer's machine, whose slot number another member may have too.

        in_standing_crew: its number may be beyond the plan's. stands: further iterations follow.
        """
        history = self._history
        if helps_out or in_standing_crew:
            pool, in_crew, time_limit_s = TRAIN_POOL if helps_out else "rollout", False, 0.0 if helps_out else None
        else:
            pool, in_crew, time_limit_s = history.pool(slot), history.is_crew(slot), history.stays_s[slot]
        return SessionConfig(
            slot=slot,
            pool=pool,
            standing=stands,
            host="simulated",
            pid=1,
            started_at_s=process.clock.wall(),
            flush_interval_s=history.flush_interval_s,
            heartbeat_interval_s=history.heartbeat_interval_s,
            claim_ttl_s=history.claim_ttl_s,
            idle_timeout_s=math.inf if helps_out or stands else history.idle_timeout_s,
            time_limit_s=time_limit_s,
            objective=history.objective if in_crew else "makespan",
            cut_share=history.cut_share if in_crew else None,
            engine_restarts_max=2,
            parallel_reads=1,
        )

    def _check_threads(self, threads: Sequence[Process], name: str) -> None:
        if any(not thread.dead for thread in threads):
            self._ledger.breaks(f"error: {name} ended and left a thread running")

    def _check_unit(self, process: Machine, member: int) -> None:
        """Check that a member that left by itself has, if planned, no unfinished response of its unit.

        Where members cut, it may leave responses that another slot of the crew has had since: that one is responsible.
        """
        history = self._history
        joins = member >= len(history.plan.slots)
        if joins or self._ledger.is_closed or history.stays_s[member] is not None:
            return
        reader = JournalReader(self._ledger.store, history.plan, 1)
        reader.refresh()
        left = [r for r in history.plan.responses_of(member) if not reader.assemble(r).finish.ends_response]
        if history.cut_share is not None:
            self._counts["members that left after a cut"] += bool(left)
            left = [response for response in left if not self._is_answered_for(reader, response, member)]
        if left:
            self._ledger.breaks(f"livelock: {process.name} left although {left} of its own unit had not ended")

    def _is_answered_for(self, reader: JournalReader, response: int, member: int) -> bool:
        """Whether another slot of the crew has, or has had, the response."""
        owner = reader.book.owner(response)
        names = {*reader.book.former_owners(response), *([owner.incarnation] if owner else [])}
        slots = {reader.book.incarnations[name] for name in names} - {member}
        return any(self._history.is_crew(slot) for slot in slots)
