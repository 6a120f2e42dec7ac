"""Sessions of a small plan on the scripted engine, killed when told to; and the tokens they must end with."""

import math
import os

from storage.clock import ManualClock
from storage.journal.assembly import JournalReader
from storage.journal.claims import AskRecord, Asks
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from storage.stores.memory import MemoryStore
from tasks.planning.division import assign_groups
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.actions import Lane
from tasks.sampling.session.performer import HeartbeatWriter
from tasks.sampling.session.session import BESIDE, Session
from tasks.sampling.session.session_config import SessionConfig

GENERATIONS, GROUPS, SLOTS, IN_FLIGHT = 3, 5, 2, 4
PROMPTS = [PromptRow(str(k), (1, 2, k + 3), "p", {}) for k in range(GROUPS)]


def a_plan() -> PlanRecord:
    return PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=3,
        num_generations=GENERATIONS,
        prompts_key="prompts",
        first_prompt=0,
        slots=tuple(
            SlotPlan(slot=slot, pool="rollout", groups=groups)
            for slot, groups in enumerate(assign_groups(GROUPS, SLOTS))
        ),
        sampling=SamplingParams(max_completion_length=40, stop_token_ids=(0,)),
        config={},
        created_at_s=0.0,
    )


class Killed(BaseException):
    """SIGKILL: nothing of the victim runs afterwards."""


class DiesAfter(ScriptedEngine):
    """Its process is killed in the middle of a step."""

    def __init__(self, steps: int, **given) -> None:
        super().__init__(50, IN_FLIGHT, median_length=12, **given)
        self.left = steps

    def step(self):
        if self.left == 0:
            raise Killed
        self.left -= 1
        return super().step()


def load(engine, heed):
    engine.load_weights(0, {})


class InTurns(Session):
    """A session in one thread: after each action of the decode lane, the other lanes do what is due.

    Time passes in the engine, and when all lanes rest.
    """

    def __init__(self, store, plan, *, engine, config, clock, **given) -> None:
        super().__init__(store, plan, engine=engine, config=config, clock=clock, **given)
        self.engine = engine
        self._heartbeat = HeartbeatWriter(store, plan.iteration, self.incarnation, engine, config, clock)
        self._until_s: dict[Lane, float] = {}
        self._has_ended = dict.fromkeys(Lane, False)

    def rest(self, lane, until_s):
        self._until_s[lane] = until_s

    def wake(self, lane):
        self._until_s.pop(lane, None)

    def start(self, lane):
        self.keep()

    def run(self):
        self._heed_notice()
        while not self._has_ended[Lane.DECODE]:
            self.advance()
            self.pass_time([self])
        return self.outcome()

    def claim(self):
        """Claim the slot; returns how many responses are to be extended."""
        while not self.state.claimed and not self.state.closed:
            self.keep()
            self.pass_time([self])
        return len(self.state.holdings.held)

    def advance(self):
        """The decode lane's next action, unless it rests, and then what is due of the other lanes."""
        if not self._rests(Lane.DECODE):
            self._has_ended[Lane.DECODE] = not self.turn(Lane.DECODE)
        self.keep()
        return not self._has_ended[Lane.DECODE]

    def keep(self):
        """The other lanes' actions, until they rest."""
        while due := [lane for lane in BESIDE if not (self._has_ended[lane] or self._rests(lane))]:
            self._has_ended[due[0]] = not self.turn(due[0])

    def beat(self):
        """Write a heartbeat, as a member does that is too busy to look at the journal."""
        self._heartbeat.beat(self.state.heartbeat_state())

    @staticmethod
    def pass_time(sessions):
        """Sleep until the first of these sessions has something to do."""
        open_lanes = [(each, lane) for each in sessions for lane in Lane if not each._has_ended[lane]]
        if open_lanes and all(each._rests(lane) for each, lane in open_lanes):
            clock = sessions[0].clock
            clock.sleep(min(each._until_s[lane] for each, lane in open_lanes) - clock.monotonic())

    def _rests(self, lane):
        return self._until_s.get(lane, -math.inf) > self.clock.monotonic()


def a_session(
    store,
    slot,
    *,
    steps=10**9,
    clock=None,
    notice=lambda: False,
    flush_interval_s=3.0,
    in_threads=False,
    load=load,
    idle_timeout_s=0.0,
    engine=DiesAfter,
    engine_restarts_max=0,
    plan=None,
    step_time_s=lambda _: 1.0,
    environments=None,
    health=None,
    corpus=None,
    **settings,
):
    clock, plan = clock or ManualClock(), plan or a_plan()
    engine = engine(steps, clock=clock, step_time_s=step_time_s)
    config = SessionConfig(
        **{
            "slot": slot,
            "pool": plan.slots[slot].pool if slot < len(plan.slots) else "joined",
            "host": "here",
            "pid": os.getpid(),
            "flush_interval_s": flush_interval_s,
            "heartbeat_interval_s": flush_interval_s,
            "claim_ttl_s": 4 * flush_interval_s,
            "idle_timeout_s": idle_timeout_s,
            "engine_restarts_max": engine_restarts_max,
            **settings,
        }
    )
    kind = Session if in_threads else InTurns
    return kind(
        store,
        plan,
        prompts=PROMPTS,
        engine=engine,
        load=load,
        config=config,
        clock=clock,
        notice=notice,
        environments=environments,
        health=health,
        corpus=corpus,
    )


def side_by_side(*sessions):
    """Live through them turn by turn in one thread; they share a clock. The names in the order of leaving."""
    for session in sessions:
        session.claim()
    staying, left = list(sessions), []
    while staying:
        for session in list(staying):
            if not session.advance():
                staying.remove(session)
                left.append(session.incarnation)
        InTurns.pass_time(staying)
    return left


def live(session):
    return session.run()


def responses(store):
    reader = JournalReader(store, a_plan())
    reader.refresh()
    found = [reader.assemble(response) for response in range(GROUPS * GENERATIONS)]
    assert all(response.finish.ends_response for response in found)
    return [(r.token_ids.tolist(), r.logprobs.tolist(), r.finish) for r in found]


def undisturbed():
    store = MemoryStore()
    for slot in range(SLOTS):
        live(a_session(store, slot))
    return responses(store)


EXPECTED = undisturbed()


def ask_for(store, session, responses):
    """Another member asks the session for responses."""
    Asks(store, 0).write(session.incarnation, AskRecord(asker="00009-other", responses=tuple(responses)))
