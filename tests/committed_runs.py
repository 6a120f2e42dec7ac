"""Runs written by hand, iteration by iteration, as far as retention and export look at them."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from storage.digests import digest_of
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_batches
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import BatchRecord, GradedResponse, PlanRecord, ReportRecord, RunRecord
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import TensorBlock, publish
from tests.journals import Incarnation, a_plan

GROUPS, GENERATIONS = 2, 2
PROMPTS = [
    PromptRow("p0", (1, 2), "1+1=", {"answer": "2"}),
    PromptRow("p1", (1, 3), [{"role": "user", "content": "2+2="}], {"answer": "4", "level": [1, None]}),
]
TOKENS = {0: [11, 12, 13, 14, 2], 1: [1, 1, 2], 2: [5, 5, 70_000, 2], 3: [7]}


def begin(store: ObjectStore, files: Mapping[str, bytes] = MappingProxyType({}), config: Any = None) -> None:
    """The run's model files and run.json, also in place of others."""
    for key in store.list(layout.MODEL):
        store.delete(key)
    for name, body in files.items():
        store.put(layout.model_file(name), body)
    digests = {name: digest_of(body) for name, body in files.items()}
    record = RunRecord(config=config or {}, digest="", vocab_size=1, model_files=digests, created_at_s=0.0)
    records.put(store, layout.RUN, record)


def plan_iteration(store: ObjectStore, iteration: int) -> PlanRecord:
    """Prompts and plan of 2 groups of 2, on two slots."""
    body = encode_prompts(PROMPTS)
    key = layout.prompts(iteration, digest_of(body))
    store.put(key, body)
    plan = a_plan(
        groups=GROUPS,
        generations=GENERATIONS,
        slots=2,
        iteration=iteration,
        weight_version=iteration,
        prompts_key=key,
        config={"iteration": iteration},
    )
    records.commit(store, layout.plan(iteration), plan)
    return plan


def roll_out(store: ObjectStore, plan: PlanRecord, responses: tuple[int, ...] = (0, 1, 2, 3)) -> None:
    """The journal: response 0 by two lives of slot 0, with a void shard in between; `responses` get their end."""
    victim = Incarnation(store, plan, 0, f"00000-{'a' * 16}")
    victim.write(0, TOKENS[0][:3], Finish.RUNNING)
    successor = Incarnation(store, plan, 0, f"00000-{'b' * 16}")
    victim.write(0, [99], Finish.RUNNING)
    other = Incarnation(store, plan, 1, f"00001-{'c' * 16}")
    for response in responses:
        rest = TOKENS[response][3:] if response == 0 else TOKENS[response]
        writer = successor if response < GENERATIONS else other
        writer.write(response, rest, Finish.LENGTH if response == 3 else Finish.STOP)
    for life in (victim, successor, other):
        life.announce(started_at_s=1, updated_at_s=2, tokens_generated=1, gone=True)


def grade(store: ObjectStore, plan: PlanRecord, number: int, responses: tuple[int, ...]) -> None:
    """One batch record of `responses`."""
    reader = JournalReader(store, plan)
    reader.refresh()
    graded = []
    for response in responses:
        assembled = reader.assemble(response)
        graded.append(
            GradedResponse(
                response=response,
                length=len(assembled.token_ids),
                policy_length=assembled.policy_length,
                finish_reason="length" if assembled.finish == Finish.LENGTH else "stop",
                lineage=assembled.lineage,
                reward=response / 4,
                rewards={"exact": response / 4, "style": None if response == 0 else 0.5},
            )
        )
    batch = BatchRecord(iteration=plan.iteration, number=number, responses=tuple(graded))
    records.put(store, layout.batch(plan.iteration, number), batch)


def publish_state(store: ObjectStore, prefix: str, version: int) -> None:
    """Three tensors, of which each is an object."""
    blocks = {f"{tensor}": TensorBlock("F32", (1,), bytes([version, tensor, 0, 0])) for tensor in range(3)}
    publish(store, prefix, blocks, {}, object_bytes_max=4)


def publish_version(store: ObjectStore, version: int) -> None:
    """Weights and, but for version 0, the trainer's state."""
    for prefix in (layout.weights(version), layout.checkpoint(version)) if version else (layout.weights(0),):
        publish_state(store, prefix, version)


def commit(store: ObjectStore, plan: PlanRecord) -> None:
    """The report on what the batches name."""
    graded = [response for batch in read_batches(store, plan.iteration) for response in batch.graded]
    report = ReportRecord(
        iteration=plan.iteration,
        weight_version=plan.iteration + 1,
        next_prompt=0,
        metrics={"reward": 0.375},
        rewards=tuple(response.reward for response in graded if response.reward is not None),
        lengths=tuple(response.policy_length for response in graded if response.reward is not None),
        lives=(),
        train_started_at_s=0,
        train_ended_at_s=0,
        created_at_s=0,
    )
    records.commit(store, layout.report(plan.iteration), report)


def committed_iteration(store: ObjectStore, iteration: int) -> PlanRecord:
    """Everything from plan to report."""
    plan = plan_iteration(store, iteration)
    roll_out(store, plan)
    grade(store, plan, 0, (2, 3))
    grade(store, plan, 1, (0, 1))
    publish_version(store, iteration + 1)
    commit(store, plan)
    return plan


def run_of(store: ObjectStore, iterations: int) -> None:
    """A run with so many committed iterations."""
    begin(store)
    publish_version(store, 0)
    for iteration in range(iterations):
        committed_iteration(store, iteration)
