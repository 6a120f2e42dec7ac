"""Equal work for the arms of engine benchmarks: a small random model, equal responses, with and without a journal."""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from storage.clock import SystemClock
from storage.journal.noise_keys import noise_key
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from storage.stores.local import LocalStore
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.session.session import Session
from tasks.sampling.session.session_config import SessionConfig

PROMPT = tuple(range(3, 19))
GROUP_SIZE = 8


def probe_model(vocab_size: int) -> Any:
    """A random Qwen2: hidden 256, 4 layers, 4 heads of 64, 2 key-value heads."""
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()


def decode(engine: Engine, responses: int, tokens: int) -> float:
    """Tokens per second of `responses` responses of `tokens` tokens, prefill included."""
    sampling = SamplingParams(max_completion_length=tokens)
    requests = [
        GenerationRequest(index, index // GROUP_SIZE, PROMPT, (), noise_key(0, 0, index), sampling)
        for index in range(responses)
    ]
    started_s = time.perf_counter()
    engine.start(requests)
    while engine.step():
        pass
    return responses * tokens / (time.perf_counter() - started_s)


def one_slot_plan(groups: int, tokens: int) -> PlanRecord:
    """A plan with all groups in one slot, and responses of at most `tokens` tokens."""
    return PlanRecord(
        iteration=0,
        weight_version=0,
        run_seed=0,
        num_generations=GROUP_SIZE,
        prompts_key="prompts",
        first_prompt=0,
        slots=(SlotPlan(slot=0, pool="rollout", groups=tuple(range(groups))),),
        sampling=SamplingParams(max_completion_length=tokens),
        config={},
        created_at_s=0.0,
    )


def journal(
    engine: Engine,
    responses: int,
    tokens: int,
    flush_interval_s: float,
    clock_s: Callable[[], float] = time.perf_counter,
) -> float:
    """Tokens per second, by `clock_s`, of a session that does the same work and journals to a local disk."""
    groups = responses // GROUP_SIZE
    plan = one_slot_plan(groups, tokens)
    names = SessionConfig(
        slot=0,
        pool="rollout",
        host="here",
        pid=0,
        flush_interval_s=flush_interval_s,
        heartbeat_interval_s=flush_interval_s,
        claim_ttl_s=3 * flush_interval_s,
        idle_timeout_s=0.0,
    )
    prompts = [PromptRow(str(group), PROMPT, "", {}) for group in range(groups)]
    with tempfile.TemporaryDirectory() as folder:
        store = LocalStore(Path(folder))
        session = Session(
            store,
            plan,
            prompts=prompts,
            engine=engine,
            load=lambda _, __: None,
            config=names,
            clock=SystemClock(),
            notice=lambda: False,
        )
        started_s = clock_s()
        session.run()
        return responses * tokens / (clock_s() - started_s)
