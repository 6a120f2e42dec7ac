"""Draft sources: tokens per step by source over two epochs of the same prompts, with a policy that has moved between.

The first epoch's responses are stored as a part, and come back as a member reads them: by the order of the data, the
earlier plan and the part. A part of benchmarks.speculation.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from storage.clock import SystemClock
from storage.journal.response_parts import ResponsesRecord, StoredPart
from storage.journal.responses import Response, encode_responses
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.framing import trailer_digest
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord, SamplingParams, SlotPlan
from storage.stores.memory import MemoryStore
from storage.stores.metered import metered, requests_of
from storage.stores.store import ObjectStore
from tasks.configuration.data import DataConfig
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.session.draft_corpus import DraftCorpus
from tasks.sampling.session.past_responses import PastResponses

DRAFTS, ROWS = 4, (8, 64)
SOURCES = ("ngram", "siblings", "siblings and last epoch")
Found = Mapping[int, tuple[list[int], list[float]]]
MakeEngine = Callable[[Path, int, Speculation | None], TorchEngine]
"""An engine of the policy in a directory, with so many rows."""


class Outcome(Protocol):
    """What decoding gave: tokens and log-probs by response, and the number of steps."""

    @property
    def found(self) -> Found: ...

    @property
    def steps(self) -> int: ...


def stored_epoch(requests: Sequence[GenerationRequest], found: Found) -> tuple[ObjectStore, PlanRecord]:
    """A run whose iteration 0 drew these prompts and is compacted, and the plan of iteration 1 with equal prompts."""
    store = MemoryStore("run")
    groups = requests[-1].group + 1
    generations = len(requests) // groups
    slot = SlotPlan(slot=0, pool="rollout", groups=tuple(range(groups)))
    plans = [
        PlanRecord(
            iteration=iteration,
            weight_version=iteration,
            run_seed=0,
            num_generations=generations,
            prompts_key="prompts",
            first_prompt=iteration * groups,
            slots=(slot,),
            sampling=SamplingParams(max_completion_length=1),
            config={},
            created_at_s=0.0,
            prompts_per_epoch=groups,
        )
        for iteration in range(2)
    ]
    rows = [
        Response(
            request.response,
            request.group,
            str(request.group),
            np.array(found[request.response][0], dtype=np.uint32),
            np.array(found[request.response][1], dtype=np.float32),
            Finish.STOP,
            1.0,
            {},
            0,
            (len(found[request.response][0]),),
            (len(found[request.response][0]),),
            (),
        )
        for request in requests
    ]
    body = encode_responses(rows)
    part = StoredPart(first=0, last=len(rows) - 1, digest=trailer_digest(body))
    store.put(layout.responses_part(0, part.first, part.last), body)
    records.put(store, layout.plan(0), plans[0])
    records.put(store, layout.responses(0), ResponsesRecord(iteration=0, parts=(part,)))
    return store, plans[1]


def read_past(store: ObjectStore, plan: PlanRecord, requests: Sequence[GenerationRequest]) -> DraftCorpus:
    """What a member's thread reads of the first epoch."""
    prompts = {request.group: PromptRow(str(request.group), request.prompt_ids, "", {}) for request in requests}
    corpus = DraftCorpus([prompts[group] for group in range(len(prompts))])
    PastResponses(store, plan, DataConfig(shuffle=False), 0, corpus, SystemClock()).read()
    return corpus


def two_epochs(
    policies: tuple[Path, Path],
    requests_to: Callable[[Path, int, int], list[GenerationRequest]],
    groups: int,
    make_engine: MakeEngine,
    decode: Callable[[TorchEngine, Sequence[GenerationRequest]], Outcome],
    *,
    context_length: int,
) -> list[dict[str, Any]]:
    """The table of sources, for the second epoch; the last row says what the first epoch's part cost.

    policies: the policy of each epoch. requests_to: the requests of an iteration to the prompts of so many groups.
    """
    epochs = [requests_to(policy, iteration, groups) for iteration, policy in enumerate(policies)]
    before = decode(make_engine(policies[0], max(ROWS), None), epochs[0]).found
    run, plan = stored_epoch(epochs[0], before)
    table: list[dict[str, Any]] = []
    for rows in ROWS:
        plain = decode(make_engine(policies[1], rows, None), epochs[1])
        for source in SOURCES:
            drafter = SuffixDrafter(rows=rows, context_length=context_length, siblings=source != "ngram")
            speculation = Speculation(drafter, DRAFTS)
            engine = make_engine(policies[1], rows, speculation)
            if source == SOURCES[-1]:
                corpus = read_past(run, plan, epochs[1])
                while corpus.feed(engine):
                    pass
            drafted = decode(engine, epochs[1])
            totals = speculation.totals
            table.append(
                {
                    "epoch": 2,
                    "rows": rows,
                    "source": source,
                    "drafts": DRAFTS,
                    "identical": sum(drafted.found[r][0] == plain.found[r][0] for r in plain.found),
                    "accepted": totals.accepted / max(1, totals.drafted),
                    "tokens/step": totals.tokens / drafted.steps,
                    "plain tokens/step": totals.tokens / plain.steps,
                }
            )
    asked, began_s = metered(run), time.process_time()
    read_past(asked, plan, epochs[1])
    tokens = sum(len(ids) for ids, _ in before.values())
    requests = requests_of(asked)
    cost = {"gets": requests.gets, "bytes/token": requests.bytes_read / tokens, "tokens": tokens}
    return [*table, {"source": "reading the last epoch", **cost, "seconds": time.process_time() - began_s}]
