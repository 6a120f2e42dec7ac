"""Comparison of a disturbed iteration with an undisturbed rollout of the same plan, response by response."""

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np

from storage.clock import SystemClock
from storage.journal.assembly import Assembled, JournalReader
from storage.journal.compaction import read_responses
from storage.journal.responses import Response
from storage.journal.turns import decode_turn
from storage.records import model_files, prompt_table
from storage.records.records import PlanRecord
from storage.records.run import read_plan, read_run
from storage.stores.connect import connect
from storage.stores.memory import MemoryStore
from storage.stores.store import ObjectStore
from storage.weights.versions import pull_version
from tasks.configuration.run_config import parse
from tasks.sampling.engines.choose import build_engine
from tasks.sampling.session.session import Session
from tasks.sampling.session.session_config import SessionConfig
from tasks.turns.opened_environments import opened_environments


def undisturbed_equals(
    run_url: str, iteration: int, engine: Literal["torch", "vllm"] | None = None
) -> tuple[int, int, float]:
    """Compare an iteration with a fresh rollout: identical responses, responses, largest difference of a log-prob.

    Responses are identical if they have the same tokens by the same writers, the same end, and turns with the same
    calls, answers and reward. engine: the engine of the fresh rollout; None takes the run's.
    """
    store = connect(run_url)
    plan = read_plan(store, iteration)
    fresh = undisturbed(store, plan, engine)
    identical, difference = 0, 0.0
    for kept in read_responses(store, iteration):
        again = fresh.assemble(kept.response)
        if identical_responses(kept, again):
            identical += 1
            difference = max(difference, float(np.abs(kept.logprobs - again.logprobs).max()))
    return identical, plan.num_responses, difference


def identical_responses(kept: Response, again: Assembled) -> bool:
    """Whether a stored response is one that was generated again, by all but its log-probs and how long calls took."""
    return np.array_equal(kept.token_ids, again.token_ids) and (kept.origins, kept.finish, _said(kept.events)) == (
        again.origins,
        again.finish,
        _said(again.events),
    )


def _said(events: Sequence[bytes]) -> list[tuple[object, ...]]:
    """What turns say of the conversation itself."""
    turns = [decode_turn(event) for event in events]
    return [(turn.reward, [(call.call_id, call.arguments, call.result) for call in turn.calls]) for turn in turns]


def undisturbed(store: ObjectStore, plan: PlanRecord, engine: Literal["torch", "vllm"] | None = None) -> JournalReader:
    """Generate the plan's responses again, in memory, by one undisturbed session per slot."""
    config = parse(plan.config)
    rollout = config.rollout
    rollout = replace(rollout, engine=engine or rollout.engine)
    prompts = prompt_table.read_prompts(store, plan)
    _, tensors = pull_version(store, plan.weight_version, None, SystemClock())
    memory, clock = MemoryStore(), SystemClock()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        model_files.download(store, Path(folder))
        environments = opened.enter_context(opened_environments(config.turns, memory, plan, Path(folder)))
        fresh = build_engine(rollout, Path(folder), read_run(store).vocab_size)
        opened.callback(fresh.close)
        for slot in plan.slots:
            names = SessionConfig(
                slot=slot.slot,
                pool=slot.pool,
                host="",
                pid=0,
                flush_interval_s=60.0,
                heartbeat_interval_s=60.0,
                claim_ttl_s=180.0,
                idle_timeout_s=0.0,
            )
            Session(
                memory,
                plan,
                prompts=prompts,
                engine=fresh,
                load=lambda into, _: into.load_weights(plan.weight_version, tensors),
                config=names,
                clock=clock,
                notice=lambda: False,
                environments=environments,
            ).run()
    reader = JournalReader(memory, plan)
    reader.refresh()
    return reader
