"""A run whose teacher has a pool, and its scorers, on one machine."""

from dataclasses import replace

from storage.clock import ManualClock
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.run_config import parse
from tasks.learning.ranks import Ranks
from tasks.learning.score_session import ScoreSession
from tests.dying_store import DiesAtWrite
from tests.small_run import document, memory_store

URL = "memory://scored"
SCORING = layout.scoring(0)


def settings(model, teacher, **sections):
    given = document(
        URL,
        model,
        trainer={"micro_batch_tokens_max": 640, "group_timeout_s": 90.0},
        sampling={"max_completion_length": 40, "temperature": 0.8},
        pools={"scoring": {"teachers": {"count": 2, "interruptible": True}}} if "pool" in teacher else {},
        teacher=teacher,
        **sections,
    )
    del given["rewards"]
    return parse(given)


def opened(objects, writes=1 << 30):
    return memory_store("scored", DiesAtWrite("scored", objects, writes))


def session(store, scorer=0, shard_tokens=7, clock=None, notice=lambda: False, **teacher):
    """A scorer; `teacher` replaces fields of that section."""
    plan = read_plan(store, 0)
    config = config_in_force(store, plan)
    return ScoreSession(
        store,
        plan,
        prompts=read_prompts(store, plan),
        config=config,
        teacher=replace(config.teacher, **teacher),
        ranks=Ranks(),
        scorer=scorer,
        clock=clock or ManualClock(),
        notice=notice,
        shard_tokens=shard_tokens,
    )


def claims_of(store):
    """The claims of the scorers by unit."""
    found = {}
    for key in store.list(SCORING + layout.claims(0)):
        unit, _ = layout.claim_address(key)
        found.setdefault(unit, []).append(key)
    return found
