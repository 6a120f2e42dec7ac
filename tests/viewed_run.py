"""A small run to look at: iteration 0 is compacted, 1 is committed, 2 is under way; a life of slot 0 was lost."""

from dataclasses import replace
from pathlib import Path

from examples.warm_start import build_tokenizer
from storage.digests import digest_of
from storage.journal.retention import settle
from storage.records import layout, records
from storage.records.prompt_table import encode_prompts
from storage.records.records import ClosedRecord, PlanRecord, ReportRecord, SlotLife
from storage.stores.connect import connect
from storage.stores.store import ObjectStore
from tasks.configuration.run_config import dump, parse
from tests.committed_runs import PROMPTS, begin, grade, plan_iteration, roll_out, run_of

ITERATIONS = 3
COMMITTED = 2
HOSTILE = "</script><img src=x onerror='window.harmed=1'>"
CONFIG = dump(
    parse(
        {
            "run": {"url": "memory://viewed", "num_prompts_per_step": 2, "num_generations": 2},
            "policy": {"path": "models/tiny"},
            "data": {"source": "arithmetic"},
            "rewards": [{"function": "arithmetic"}],
        }
    )
)


def write_viewed_run(url: str, model: Path) -> ObjectStore:
    """Write the run to `url`; `model` is an empty directory for its tokenizer."""
    build_tokenizer().save_pretrained(model)
    (model / "config.json").write_text('{"model_type": "qwen2"}')
    store = connect(url)
    run_of(store, COMMITTED)
    begin(store, {path.name: path.read_bytes() for path in model.iterdir()}, CONFIG)
    for iteration in range(COMMITTED):
        _complete_report(store, iteration)
        records.commit(store, layout.closed(iteration), ClosedRecord(iteration=iteration, reason="all recorded"))
    settle(store, 0)
    plan = _plan_with_markup(store)
    roll_out(store, plan, responses=(1, 2, 3))
    grade(store, plan, 0, (2, 3))
    for iteration in range(ITERATIONS):
        written = records.read(store, PlanRecord, layout.plan(iteration))
        records.put(store, layout.plan(iteration), replace(written, config=CONFIG))
    return store


def _plan_with_markup(store: ObjectStore) -> PlanRecord:
    """The plan of the iteration under way, whose second prompt is markup."""
    plan = plan_iteration(store, COMMITTED)
    body = encode_prompts([PROMPTS[0], replace(PROMPTS[1], prompt=HOSTILE, columns={"answer": HOSTILE})])
    key = layout.prompts(COMMITTED, digest_of(body))
    store.put(key, body)
    marked = replace(plan, prompts_key=key)
    records.put(store, layout.plan(COMMITTED), marked)
    return marked


def life(incarnation: str, state: str, started_at_s: float = 1.0) -> SlotLife:
    return SlotLife(
        slot=int(incarnation[:5]),
        incarnation=incarnation,
        pool="rollout",
        started_at_s=started_at_s,
        ended_at_s=started_at_s + 5,
        state=state,  # type: ignore[arg-type]
        tokens_kept=5,
        tokens_recovered=0,
        tokens_regenerated=1,
    )


def _complete_report(store: ObjectStore, iteration: int) -> None:
    report = records.read(store, ReportRecord, layout.report(iteration))
    metrics = {
        "reward": 0.375 + iteration / 8,
        "completions/mean_length": 3.25,
        "completions/max_length": 5.0,
        "num_tokens": 13.0,
        "entropy": 1.5,
        "mismatch_kl": 0.001,
        "timing_s/iteration": 20.0,
        "timing_s/rollout": 6.5,
        "cost/usd_iter": 0.25,
        "cost/usd_run": 0.25 * (iteration + 1),
        "preempt/count": 1.0,
    }
    lives = (
        life(f"00000-{'a' * 16}", "lost"),
        life(f"00000-{'b' * 16}", "gone", 3.0),
        life(f"00001-{'c' * 16}", "gone"),
    )
    records.put(store, layout.report(iteration), replace(report, metrics=metrics, lives=lives))
