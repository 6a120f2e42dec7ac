"""A member of the crew on whatever machine it runs: build the adapters from the run's url, and drive one session."""

import logging
import os
import socket
import tempfile
from collections.abc import Callable
from pathlib import Path

from resources.process import started_at_s
from storage import layout, model_files, prompt_table
from storage.clock import Clock
from storage.connect import connect
from storage.run import read_config, read_plan, read_run
from storage.store import ObjectMissing
from storage.weights import pull
from tasks.configuration.run_config import parse
from tasks.sampling.choose import build_engine
from tasks.sampling.config import RolloutConfig
from tasks.sampling.engine import Engine, EngineError
from tasks.sampling.session import Session, SessionConfig, SessionOutcome

log = logging.getLogger(__name__)


def generate_slot(
    run_url: str,
    iteration: int,
    slot: int,
    notice: Callable[[], bool],
    clock: Clock,
    build: Callable[[RolloutConfig, Path, int], Engine] = build_engine,
) -> SessionOutcome:
    """Generate what the plan gives to a slot, from where the journal stands. Raises Preempted after a notice."""
    store = connect(run_url)
    try:
        plan = read_plan(store, iteration)
    except ObjectMissing as error:
        raise EngineError(f"this machine does not see iteration {iteration} of the run at {run_url}") from error
    config = parse(read_config(store, plan), f"the configuration of iteration {iteration}")
    prompts = prompt_table.decode_prompts(plan.prompts_key, store.get(plan.prompts_key))
    with tempfile.TemporaryDirectory(prefix="gleaner-model-") as folder:
        model_files.download(store, Path(folder))
        engine = build(config.rollout, Path(folder), read_run(store).vocab_size)
        session = Session(
            store,
            plan,
            prompts=prompts,
            engine=engine,
            config=SessionConfig(
                slot=slot,
                pool=plan.slots[slot].pool,
                host=socket.gethostname(),
                pid=os.getpid(),
                started_at_s=started_at_s(),
                flush_interval_s=config.rollout.flush_interval_s,
                heartbeat_interval_s=config.rollout.heartbeat_interval_s,
            ),
            clock=clock,
            notice=notice,
        )
        left = session.claim()
        log.info("slot %d: %d responses to extend, incarnation %s", slot, left, session.incarnation)

        def load(into: Engine) -> None:
            _, tensors = pull(store, layout.weights(plan.weight_version))
            into.load_weights(plan.weight_version, tensors)

        session.load_weights(load)
        try:
            return session.run()
        finally:
            engine.close()
