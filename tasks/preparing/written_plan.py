"""Writing a plan: its prompts are drawn and stored, then the record that names the prompts is created."""

from dataclasses import replace
from pathlib import Path

from storage.clock import Clock
from storage.digests import digest_of
from storage.records import layout, prompt_table, records
from storage.records.planning_records import LengthsRecord
from storage.records.prompt_table import PromptRow
from storage.records.records import PlanRecord
from storage.stores.store import ConflictingRecord, ObjectStore, commit
from tasks.configuration.example_clashes import group_size
from tasks.configuration.run_config import RunConfig, dump
from tasks.history.known_lengths import expected_lengths, lengths_record
from tasks.history.planning_inputs import planning_request
from tasks.planning.division import groups_in_budget
from tasks.planning.iteration_plan import IterationPlan, plan_iteration
from tasks.preparing.checks import draw
from tasks.preparing.example_journal import plan_of_examples
from tasks.preparing.replayed_groups import NOTHING, Replayed, slots_of_replayed
from tasks.preparing.tools import openings
from tasks.prompts.draw import prompts_at
from tasks.prompts.prompt import PromptSet
from tasks.prompts.tokenise import Tokenizer
from tasks.turns.tool_schemas import Schema


def write_plan(
    store: ObjectStore,
    config: RunConfig,
    rows: list[PromptRow],
    iteration: int,
    weight_version: int,
    first_prompt: int,
    stop_ids: tuple[int, ...],
    clock: Clock,
    tools: tuple[Schema, ...] = (),
    prompts_per_epoch: int = 0,
    counted_from: int = 0,
    replayed: Replayed = NOTHING,
) -> None:
    """Write the prompts, then the plan that names the prompts; losing the race to a second planner is no error.

    rows: one per group to generate; with filter_groups only num_prompts_per_step groups are wanted. tools: tools shown
    in the prompts. prompts_per_epoch: the size of the data set; 0: members find no earlier responses for drafts.
    counted_from: as in the plan. replayed: the last groups, of other runs. Raises
    BudgetExceeded, and ValueError without a member to generate, before the iteration's first write.
    """
    planned, expected = _planned(store, config, rows, iteration)
    body = prompt_table.encode_prompts([*rows, *replayed.rows])
    prompts_key = layout.prompts(iteration, digest_of(body))
    if not commit(store, prompts_key, body):
        raise ConflictingRecord(f"{prompts_key!r} holds other bytes than its name says")
    record = PlanRecord(
        iteration=iteration,
        weight_version=weight_version,
        run_seed=config.run.seed,
        num_generations=group_size(config.algorithm, config.run.num_generations),
        prompts_key=prompts_key,
        first_prompt=first_prompt,
        slots=(*planned.slots, *slots_of_replayed(replayed, len(rows), len(planned.slots))),
        sampling=config.sampling.params(stop_ids),
        config=dump(config),
        created_at_s=clock.wall(),
        tools=tools,
        prompts_per_epoch=prompts_per_epoch if config.rollout.speculation.drafts != 0 else 0,
        groups_wanted=config.run.num_prompts_per_step if config.algorithm.filter_groups else None,
        lengths=expected,
        seeding=planned.seeding,
        decisions=planned.decisions,
        counted_from=counted_from,
        replayed=replayed.sources,
    )
    records.commit(store, layout.plan(iteration), record)


def _planned(
    store: ObjectStore, config: RunConfig, rows: list[PromptRow], iteration: int
) -> tuple[IterationPlan, LengthsRecord | None]:
    """The plan of an iteration, and the expected lengths."""
    if config.algorithm.learns_examples:
        return plan_of_examples(len(rows)), None
    length_max = config.sampling.max_completion_length
    lengths = expected_lengths(store, iteration, rows, config.planning, length_max=length_max)
    return plan_iteration(planning_request(store, config, iteration, lengths)), lengths_record(lengths)


def draw_rows(
    config: RunConfig, prompts: PromptSet, tokenizer: Tokenizer, model_dir: Path, first: int | None, counted: int
) -> list[PromptRow]:
    """The prompts of an iteration, one per group, with the additions of environments; counted: as in its plan.

    first: None takes all prompts, in their order.
    """
    count = _groups_planned(config)
    if first is None:
        config, first, count = replace(config, data=replace(config.data, shuffle=False)), 0, len(prompts)
    added = openings(config, prompts_at(prompts, config.data, first, count), config.run.seed, counted)
    return draw(config, prompts, tokenizer, model_dir, first=first, count=count, openings=added)


def _groups_planned(config: RunConfig) -> int:
    wanted, algorithm = config.run.num_prompts_per_step, config.algorithm
    if config.data.replay is not None:
        wanted -= config.data.replay.groups(wanted)
    return groups_in_budget(wanted, algorithm.filter_groups_budget) if algorithm.filter_groups else wanted
