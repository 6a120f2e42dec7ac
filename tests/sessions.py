"""Sessions of a small plan on the scripted engine, killed when told to; and the tokens they must end with."""

import os

from storage.assembly import JournalReader
from storage.clock import ManualClock
from storage.memory import MemoryStore
from storage.prompt_table import PromptRow
from storage.records import PlanRecord, SamplingParams, SlotPlan
from tasks.planning.division import assign_groups
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.session import Session
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


def a_session(
    store,
    slot,
    *,
    steps=10**9,
    clock=None,
    notice=lambda: False,
    flush_interval_s=3.0,
    background=False,
    load=load,
    idle_timeout_s=0.0,
    engine=DiesAfter,
    engine_restarts_max=0,
    plan=None,
    **settings,
):
    clock, plan = clock or ManualClock(), plan or a_plan()
    engine = engine(steps, clock=clock, step_time_s=lambda _: 1.0)
    config = SessionConfig(
        slot=slot,
        pool=plan.slots[slot].pool if slot < len(plan.slots) else "joined",
        host="here",
        pid=os.getpid(),
        flush_interval_s=flush_interval_s,
        heartbeat_interval_s=flush_interval_s,
        claim_ttl_s=4 * flush_interval_s,
        idle_timeout_s=idle_timeout_s,
        engine_restarts_max=engine_restarts_max,
        background=background,
        **settings,
    )
    return Session(store, plan, prompts=PROMPTS, engine=engine, load=load, config=config, clock=clock, notice=notice)


def side_by_side(*sessions):
    """Live through them turn by turn in one thread; they share a clock. The names in the order of leaving."""
    for session in sessions:
        session.claim()
    staying, left = list(sessions), []
    while staying:
        for session in list(staying):
            if session._is_done():
                session._leave()
                staying.remove(session)
                left.append(session.incarnation)
            else:
                session._turn()
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
