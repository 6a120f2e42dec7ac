"""A small run of format 1: an object of every kind, always with the same content.

`python -m tests.format_one` writes it to tests/data/format_1. tests/storage/records/test_format_one.py compares the
files with what the code writes and reads. The files are written again only if the format changes on purpose, with its
number.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from storage.digests import digest_of
from storage.fleet.fleet_records import DueRecord
from storage.fleet.phase_failure import NonFiniteRecord, PhaseFailureRecord
from storage.journal.claims import AskRecord
from storage.journal.response_parts import ResponsesRecord, StoredPart
from storage.journal.responses import Response, encode_responses
from storage.journal.shard import Finish, Origin, Row, encode_shard
from storage.records import canonical, layout, records
from storage.records.crew_records import HeartbeatRecord, RolloutEndedRecord
from storage.records.evaluation_records import EvaluatedPrompt, EvaluationRecord
from storage.records.failures import FailureRecord
from storage.records.forecast_records import ForecastInput, ForecastRecord, SetupForecast, Spread
from storage.records.framing import trailer_digest
from storage.records.gradings import GradedRecord, GradingRecord
from storage.records.hints import CollectedRecord
from storage.records.length_tables import LengthTable, empty_table, encode_lengths
from storage.records.lineage import KeptPromptsRecord
from storage.records.model_copies import RewardModelRecord, StoredFile
from storage.records.planning_records import DecisionRecord, LengthsRecord, PoolObservation, SeedingRecord
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import (
    BatchRecord,
    ClaimRecord,
    ClosedRecord,
    GradedResponse,
    PlanRecord,
    ReportRecord,
    RunRecord,
    SamplingParams,
    SettingsRecord,
    SlotLife,
    SlotPlan,
    Span,
    TrainingRecord,
)
from storage.records.requests import KeptRequest, RequestRecord
from storage.records.run import LeaseRecord
from storage.records.teacher_scores import encode_scores
from storage.stores.memory import MemoryStore, NestedStore
from storage.stores.store import ObjectStore
from storage.weights.tensor_sets import TensorBlock, publish
from storage.weights.versions import publish_version
from tests.fleet_of_format_one import NONCE, of_the_fleet
from tests.teacher_of_format_one import CONFIGURATION, SCORES

FOLDER = Path(__file__).parent / "data" / "format_1"
FIRST, SECOND = "00000-6614ebe3071c4f04", "00000-a1c09d2f5b7e8833"
EXECUTION = "here:a-machine:17"
CONFIG: dict[str, Any] = {"run": {"seed": 7, "url": "s3://bucket/run"}, "lora": None, "sizes": [1, 2.5, True]}
EXECUTION_DIGEST = digest_of(EXECUTION.encode())
MODEL_FILES = {"config.json": b'{"model_type":"none"}', "tokenizer.json": b'{"a":0,"b":1}'}
DIGESTS = {name: digest_of(body) for name, body in MODEL_FILES.items()}
EMBED = bytes(range(256)) * 8
EMBED_CHANGED = bytes([1]) + EMBED[1:]
SPANS = (Span(epoch=1, incarnation=FIRST, last_sequence=0), Span(epoch=2, incarnation=SECOND, last_sequence=0))
GRADED = (
    GradedResponse(
        response=0,
        length=5,
        policy_length=5,
        finish_reason="stop",
        lineage=SPANS,
        reward=0.5,
        rewards={"math": 0.5, "style": None},
    ),
    GradedResponse(
        response=1,
        length=2,
        policy_length=2,
        finish_reason="length",
        lineage=SPANS[1:],
        reward=0.25,
        rewards={"math": 0.25},
    ),
)
LIFE = SlotLife(
    slot=0,
    incarnation=SECOND,
    pool="rollout",
    started_at_s=10.5,
    ended_at_s=20.25,
    state="gone",
    tokens_kept=5,
    tokens_recovered=3,
    tokens_regenerated=1,
    prefill_tokens=12,
    usd_per_hour=1.5,
    tokens_unused=2,
    working_at_s=12.0,
    decode_s=0.1,
    puts=3,
    gets=4,
    bytes_read=500,
)
POOL = PoolObservation(
    pool="rollout", members=1.0, members_at_end=1, machine_s=9.75, losses=1, start_s=1.5, step_s=((1, 0.01),)
)
PROMPTS = [
    PromptRow("a", (1, 2, 3), "1+1=", {"answer": "2"}),
    PromptRow("b", (4,), [{"role": "user", "content": "hi \u00fc look"}], {}, " look"),
]
PROMPT_TABLE = encode_prompts(PROMPTS)
# Two prompts with two responses each; one slot of the crew and one of the trainer.
PLAN = PlanRecord(
    iteration=0,
    weight_version=0,
    run_seed=7,
    num_generations=2,
    prompts_key=layout.prompts(0, digest_of(PROMPT_TABLE)),
    first_prompt=0,
    slots=(SlotPlan(slot=0, pool="rollout", groups=(0,), batch_max=8), SlotPlan(slot=1, pool="train", groups=(1,))),
    sampling=SamplingParams(temperature=0.7, top_p=0.9, top_k=5, max_completion_length=16, stop_token_ids=(2,)),
    config=CONFIG,
    created_at_s=3.0,
    groups_wanted=1,
    lengths=LengthsRecord(predictor="history", expected=(5.5, 2.0), high=(8.0, 4.0)),
    seeding=SeedingRecord(seeding_s=4.5, members=1, memory={"1": 4.5}),
    decisions=(
        DecisionRecord(
            name="seeding",
            chosen="4.5 s",
            reason="the crew starts slowly",
            inputs={"members": 1.0},
            alternatives={"0 s": {"usd": 1.0}},
            predicted={"timing_s/wait": 0.5},
        ),
    ),
    **NONCE,
)
FORECAST = ForecastRecord(
    created_at_s=2.0,
    iterations=100,
    iterations_simulated=10,
    seeds=3,
    inputs=(ForecastInput(name="prompts", value="8", source="configured"),),
    setups=(
        SetupForecast(
            name="as configured",
            settings={"pools.rollout.count": 2},
            members=1.5,
            hours=Spread(low=1.0, median=2.0, high=3.0),
            usd_parts={"members": 4.0},
        ),
    ),
    recommended="as configured",
    reason="it costs least",
    snippet={"pools.rollout.count": 2},
    sensitivity={"2": Spread(low=1.0, median=2.0, high=3.0)},
)


KEPT = KeptPromptsRecord(rows=(0, 2))


def _row(response: int, epoch: int, start: int, ids: list[int], finish: Finish) -> Row:
    logprobs = -np.array(ids, dtype=np.float32) / 7
    return Row(response, epoch, start, np.array(ids, dtype=np.uint32), logprobs, 0, finish)


# The last shard is one that no writer of ours makes: a turn of the policy, and an answer of an environment.
SHARDS = {
    layout.shard(0, FIRST, 0): [_row(0, 1, 0, [5, 6, 7], Finish.RUNNING)],
    layout.shard(0, SECOND, 0): [_row(0, 2, 3, [8, 2], Finish.STOP), _row(1, 2, 0, [9, 70_000], Finish.LENGTH)],
    layout.shard(0, f"00001-{'e' * 16}", 0): [
        _row(2, 1, 0, [3, 4], Finish.ACTING),
        replace(
            _row(2, 1, 2, [5], Finish.RUNNING), logprobs=np.zeros(0, np.float32), origin=Origin.OBSERVATION, event=b"{}"
        ),
    ],
}


def responses() -> list[Response]:
    """The responses in the batch, as the part that holds them has them."""
    rows = {
        graded.response: [r for rs in SHARDS.values() for r in rs if r.response == graded.response] for graded in GRADED
    }
    return [
        Response(
            response=graded.response,
            group=0,
            prompt_id="a",
            token_ids=np.concatenate([row.token_ids for row in rows[graded.response]]),
            logprobs=np.concatenate([row.logprobs for row in rows[graded.response]]),
            finish=rows[graded.response][-1].finish,
            reward=graded.reward,
            rewards=graded.rewards,
            weight_version=0,
            spans=tuple(
                sum(len(row.token_ids) for row in rows[graded.response] if row.epoch == span.epoch)
                for span in graded.lineage
            ),
            origins=(graded.length,),
            events=(),
        )
        for graded in GRADED
    ]


def length_table() -> LengthTable:
    """A table that knows two prompts."""
    known = {
        "prompts": [3, 5],
        "mean": [1.5, 2.5],
        "deviation": [0.5, float("nan")],
        "count": [2, 1],
        "last_seen": [0, 0],
    }
    empty = empty_table()
    arrays = {name: np.array(values, dtype=getattr(empty, name).dtype) for name, values in known.items()}
    return replace(empty, iteration=0, learned=1, **arrays)


def of_the_run() -> dict[str, records.AnyRecord]:
    """The records outside iterations, by key."""
    settings = {"num_generations": 2}
    return {
        layout.RUN: RunRecord(
            config=CONFIG, digest="0" * 32, vocab_size=512, model_files=DIGESTS, created_at_s=1.0, **NONCE
        ),
        layout.lease(1): LeaseRecord(holder=EXECUTION, **NONCE),
        layout.evaluation(layout.evaluation_name(0, "0" * 32)): EvaluationRecord(
            weight_version=0,
            digest="0" * 32,
            settings=settings,
            metrics={"val/reward": 0.5},
            prompts=(EvaluatedPrompt(prompt_id="a", graded=1, correct=1, clipped=0, reward=0.5, length=5.0),),
            created_at_s=15.0,
            **NONCE,
        ),
        layout.forecast(digest_of(canonical.encode(FORECAST))): FORECAST,
        layout.grading("again"): GradingRecord(rewards=({"name": "math", "weight": 0.5, "model": None},)),
        layout.graded("again", 0): GradedRecord(
            iteration=0,
            responses=(0, 1),
            reward=(0.5, 0.0),
            rewards={"math": (1.0, None)},
            reward_errors=("math: no answer",),
            given_up=(),
        ),
        layout.kept_prompts(digest_of(canonical.encode(KEPT))): KEPT,
        layout.reward_model("judge"): RewardModelRecord(files={"config.json": StoredFile(bytes=1, chunks=("0" * 32,))}),
    }


def of_the_crew() -> dict[str, records.AnyRecord]:
    """The records that members write, and those about them, by key."""
    return {
        layout.claim(0, 0, 1): ClaimRecord(
            unit=0, epoch=1, incarnation=FIRST, slot=0, responses=None, sealed={}, **NONCE
        ),
        layout.claim(0, 0, 2): ClaimRecord(
            unit=0, epoch=2, incarnation=SECOND, slot=0, responses=(0, 1), sealed={FIRST: 0}, **NONCE
        ),
        layout.ask(0, FIRST, 0): AskRecord(asker=SECOND, responses=(1,), **NONCE),
        layout.alive(0, SECOND): HeartbeatRecord(
            incarnation=SECOND,
            slot=0,
            state="working",
            beat=3,
            pool="rollout",
            host="a-machine",
            pid=17,
            started_at_s=10.5,
            updated_at_s=20.25,
            tokens_generated=3,
            tokens_recovered=3,
            prefill_tokens=12,
            responses_finished=1,
            engine="torch",
            batch_invariant=True,
            claims=1,
            tokens_per_s=30.5,
            step_s=((1, 0.01), (2, 0.015)),
        ),
        layout.ended(0, EXECUTION_DIGEST) + "rollout.json": RolloutEndedRecord(
            iteration=0, execution=EXECUTION, pool="rollout", slots=(0,)
        ),
        layout.slot_failure(EXECUTION_DIGEST, 0, 0): FailureRecord(
            task="rollout",
            iteration=0,
            execution=EXECUTION,
            slot=0,
            host="a-machine",
            error="OSError: \u00fc",
            at_s=11.0,
        ),
        layout.request(digest_of(b"a key")): RequestRecord(body=digest_of(b"a body"), first_iteration=0, **NONCE),
        layout.request(digest_of(b"a sample")): RequestRecord(
            body=digest_of(b"a body"), first_iteration=1, kept=KeptRequest((5, 6), 2, 9), **NONCE
        ),
        layout.failure("train"): FailureRecord(
            task="train", iteration=0, execution=EXECUTION, host="a-machine", error="ValueError: bad", at_s=12.5
        ),
    }


def of_the_trainer() -> dict[str, records.AnyRecord]:
    """The plan, and the records from training to the report, by key."""
    metrics = {"num_tokens": 5.0, "reward": 1 / 3}
    return {
        layout.plan(0): PLAN,
        layout.settings(0): SettingsRecord(config={"rollout": {"claim_ttl_s": 2.5}}, execution=EXECUTION),
        layout.batch(0, 0): BatchRecord(
            iteration=0, number=0, responses=GRADED, reward_errors=("style: none",), filtered=(), **NONCE
        ),
        layout.collected(0): CollectedRecord(iteration=0, seconds=1.5, puts=3, gets=40),
        layout.due(0): DueRecord(iteration=0, groups=1, version="0.1.0"),
        layout.closed(0): ClosedRecord(iteration=0, reason="enough is trained", **NONCE),
        layout.phase_failure(0): PhaseFailureRecord(iteration=0, execution="e1", message="not finite"),
        layout.nonfinite(0): NonFiniteRecord(
            iteration=0, quantity="loss", responses=(0,), batches=(0,), weight_version=0, message="a loss is infinite"
        ),
        layout.training(0): TrainingRecord(
            iteration=0,
            weight_version=1,
            metrics=metrics | {"grad_norm": float("nan"), "loss": float("-inf")},
            reward_errors=(),
            started_at_s=12.0,
            ended_at_s=13.0,
            **NONCE,
        ),
        layout.report(0): ReportRecord(
            iteration=0,
            weight_version=1,
            next_prompt=1,
            metrics=metrics,
            rewards=(0.5, 0.25),
            lengths=(5, 2),
            lives=(LIFE,),
            train_started_at_s=12.0,
            train_ended_at_s=13.0,
            created_at_s=14.0,
            pools=(POOL,),
            **NONCE,
        ),
    }


def write_run(store: ObjectStore) -> None:
    """Write all objects of the run, and below `fleet/` those of its fleet, which is a store of its own."""
    fleet = NestedStore(store, "fleet")
    for key, record in of_the_fleet().items():
        records.put(fleet, key, record)
    for key, record in (of_the_run() | of_the_crew() | of_the_trainer()).items():
        records.put(store, key, record)
    for name, body in MODEL_FILES.items():
        store.put(layout.model_file(name), body)
    store.put(PLAN.prompts_key, PROMPT_TABLE)
    for key, rows in SHARDS.items():
        store.put(key, encode_shard(rows))
    part = encode_responses(responses())
    store.put(layout.responses_part(0, 0, 1), part)
    stored = StoredPart(first=0, last=1, digest=trailer_digest(part))
    records.put(store, layout.responses(0), ResponsesRecord(iteration=0, parts=(stored,)))
    store.put(layout.lengths(0), encode_lengths(length_table()))
    tensors = {"embed": TensorBlock("F32", (512,), EMBED), "norm": TensorBlock("BF16", (2, 3), bytes(range(12)))}
    publish(store, layout.weights(0), tensors, {"source": "a model"})
    publish(store, layout.teacher("teacher"), tensors, {"source": "a teacher", "config": CONFIGURATION})
    store.put(layout.teacher_scores(0, 0), encode_scores(SCORES))
    changed = tensors | {"embed": TensorBlock("F32", (512,), EMBED_CHANGED)}
    publish_version(store, 1, changed, {"source": "train"}, base=tensors, full_interval=10)


def objects() -> dict[str, bytes]:
    """The run's objects by key."""
    store = MemoryStore()
    write_run(store)
    return {key: store.get(key) for key in store.list("")}


def main() -> None:
    """Write the run to FOLDER."""
    for key, body in objects().items():
        path = FOLDER / key
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(body)


if __name__ == "__main__":
    main()
