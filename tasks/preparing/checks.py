"""The checks of `plan` before any object is created; `gleaner check` makes the checks too, and lists all findings."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from resources.model_config import model_fields
from storage.paths import expanded
from storage.records.prompt_table import PromptRow
from storage.stores.connect import LOCAL, place
from storage.waiting import Progress, no_progress
from tasks.configuration.data import SUBMITTED
from tasks.configuration.evaluation import EvaluationConfig
from tasks.configuration.older_form import ARITHMETIC
from tasks.configuration.pool_clashes import sizes_not_meant
from tasks.configuration.rewards import reward_names
from tasks.configuration.rollout import SpeculationConfig
from tasks.configuration.run_config import RunConfig
from tasks.configuration.teacher import TeacherConfig
from tasks.configuration.turns import TurnsConfig
from tasks.evaluation.held_out import draw_held_out, load_held_out
from tasks.grading.grader import check_rewards
from tasks.learning.pretrained import vocabulary_size
from tasks.preparing.adapter_fit import check_targets
from tasks.preparing.draft_model_check import check_draft_model
from tasks.preparing.engine_fit import check_engine_fits
from tasks.preparing.example_journal import check_examples
from tasks.preparing.findings import Findings
from tasks.preparing.held_run import check_fleet, check_held_run
from tasks.preparing.known_prompts import known_to_check
from tasks.preparing.local_inputs import OF_RUNS, LocalInputs, model_directory, open_local_inputs
from tasks.preparing.model_check import check_model_use
from tasks.preparing.origin import origin_to_check
from tasks.preparing.replayed_groups import choose_replayed
from tasks.preparing.stop_tokens import look_at_responses
from tasks.preparing.teacher_check import check_teachers
from tasks.preparing.tools import compared, model_tokenizer, openings, prompt_tokenizer
from tasks.preparing.trainer_fit import check_trainer_fits
from tasks.preparing.vain_settings import settings_in_vain
from tasks.prompts.draw import check_embedded, draw_prompts, prompts_at
from tasks.prompts.loading import doubts_of, load_prompts
from tasks.prompts.prompt import PromptSet
from tasks.prompts.tokenise import Tokenizer
from tasks.sampling.engines.choose import context_length

# What stands for the policy loss of each kind that learns examples.
_LOSS_OF_EXAMPLES = {"sft": "likelihood", "dpo": "preference"}


def check_settings(config: RunConfig) -> None:
    """The checks that open no user file but the price table; raises LookupError, ValueError and Refusals."""
    findings = Findings()
    findings.look(config.pools.check_prices)
    findings.refuse(*map(ValueError, sizes_not_meant(config.pools)))
    findings.look(config.tracking.check_libraries)
    findings.look(_check_turns, config)
    findings.look(_check_places, config)
    findings.settled()


def check_files(config: RunConfig, progress: Progress = no_progress) -> list[str]:
    """`check_settings`, and open everything that the configuration names, as the first plan of a run does.

    Writes nothing. Returns a line about each input looked at, and then the doubts. A refusal ends only the checks that
    need the refused input. Raises ModelError, EngineMisfit, TrainerMisfit, AdapterMisfit, PromptError, GradingError,
    EngineError, ToolsUnusable, HubError, ConflictingRecord, LookupError and ValueError, or Refusals for several.
    """
    findings = Findings()
    findings.look(check_settings, config)
    findings.doubt(settings_in_vain, config)
    progress("looking at what run.url holds", 0, 0)
    findings.doubt(check_held_run, config)
    findings.doubt(check_fleet, config)
    with open_local_inputs() as inputs:
        _look_at(config, inputs, progress, findings)
    return findings.settled()


def _look_at(config: RunConfig, inputs: LocalInputs, progress: Progress, findings: Findings) -> None:
    """Look at each input once. `config` is the written configuration; `inputs` gives local paths for ids of the hub."""
    progress("looking at the model", 0, 0)
    teacher = None if config.teacher is None else findings.look(inputs.teacher, config.teacher)
    written = config.rollout.speculation
    drafting = None if written.drafting_model is None else findings.look(inputs.speculation, written)
    directory = _look_at_model(config, teacher, drafting, inputs, findings)
    findings.look(config.algorithm.estimator.check, with_turns=config.turns is not None)
    algorithm, is_external = config.algorithm, config.trainer.is_external
    estimator = "none: examples" if algorithm.learns_examples else algorithm.advantage_estimator
    if not is_external:
        findings.seen.append(f"advantage estimator: {estimator}")
    findings.look(config.algorithm.loss.check)
    loss = "an external trainer's" if is_external else _LOSS_OF_EXAMPLES.get(algorithm.kind, algorithm.policy_loss)
    findings.seen.append(f"policy loss: {loss}")
    progress("reading prompts, and trying the rewards", 0, 0)
    data = findings.look(partial(inputs.data, kind=algorithm.kind), config.data)
    is_given = data is not None and data.source != SUBMITTED
    prompts = findings.look(partial(load_prompts, kind=algorithm.kind), data) if is_given else None
    if prompts is not None:
        prompts = _kept(config, prompts, findings)
    if config.rewards:
        _look_at_rewards(config, inputs, prompts, findings)
    tokenizer = None if directory is None else findings.look(prompt_tokenizer, config, directory)
    if directory is not None and drafting is not None:
        progress("looking at the draft model", 0, 0)
        _look_at_draft_model(config, drafting, directory, findings)
    if directory is not None and tokenizer is not None and prompts is not None:
        progress(f"tokenising {len(prompts):,} prompts", 0, 0)
        _look_at_prompts(config, prompts, tokenizer, directory, findings)
        replayed = findings.look(choose_replayed, config, 0, directory, prompts.columns)
        if replayed is not None and config.data.replay is not None:
            of = f"{len(replayed.rows)} of {config.run.num_prompts_per_step} groups in a step"
            findings.seen.append(f"data.replay: {of}, from {', '.join(config.data.replay.runs)}")
        if teacher is not None:
            progress("looking at the teacher", 0, 0)
            _look_at_teachers(config, teacher, prompts, directory, findings)
        if config.turns is not None:
            progress("opening an environment, or an agent", 0, 0)
            findings.saw(_look_at_turns, config, config.turns, prompts, tokenizer, directory)
    if config.evaluation is not None:
        progress("looking at the evaluation", 0, 0)
        _look_at_evaluation(config, config.evaluation, inputs, directory, tokenizer, findings)
    of_hub = {name: found for name, found in inputs.found.items() if name != OF_RUNS}
    findings.seen[:0] = [f"{name}: {found.repo} at commit {found.commit}" for name, found in of_hub.items()]


def _look_at_model(
    config: RunConfig,
    teacher: TeacherConfig | None,
    drafting: SpeculationConfig | None,
    inputs: LocalInputs,
    findings: Findings,
) -> Path | None:
    """The model's directory; None if its directory or config.json was refused.

    teacher, drafting: with local paths.
    """
    origin = findings.look(origin_to_check, config)
    if config.run.from_ is None:
        policy = findings.look(inputs.policy, config.policy)
    else:
        policy = None if origin is None else findings.look(origin.local_policy, config, inputs)
    directory = None if policy is None else findings.look(model_directory, replace(config, policy=policy))
    fields = None if directory is None else findings.look(model_fields, directory)
    if directory is None or fields is None:
        return None
    if origin is not None:
        findings.seen.append(f"weights: every byte of {origin.record.text}")
    findings.seen.append(f"model: the configuration, the tokenizer and the headers of the weights in {directory}")
    findings.doubt(check_engine_fits, config, directory, None if drafting is None else drafting.drafting_model)
    findings.doubt(check_trainer_fits, config, directory, teacher)
    findings.look(check_targets, config, directory, fields)
    tried = findings.look(check_model_use, config, directory)
    if tried is not None:
        findings.seen.append(f"model check: {tried.looked_at}")
        findings.doubts += tried.doubts
    return directory


def _kept(config: RunConfig, prompts: PromptSet, findings: Findings) -> PromptSet:
    """The prompts of the run among those of the source."""
    known = findings.look(known_to_check, config, prompts)
    if known is None:
        return prompts
    findings.seen.append(f"data.from: {known.origin.text}")
    return known.kept(prompts)


def _look_at_rewards(config: RunConfig, inputs: LocalInputs, prompts: PromptSet | None, findings: Findings) -> None:
    """Load each reward function, and try the function on the prompts if the prompts can be read."""
    rewards = findings.look(inputs.rewards, config.rewards)
    if rewards is None:
        return
    findings.seen.append(f"rewards: {', '.join(reward.function for reward in rewards)}")
    look = partial(
        findings.doubt,
        partial(check_rewards, rewards, None if prompts is None else prompts.columns, prompts=prompts),
        turns=config.turns,
    )
    refused = len(findings.refusals)
    look(())
    if len(findings.refusals) > refused:
        # Further rewards may be refused, too: each is tried alone.
        names = set(reward_names(rewards))
        for name in reward_names(rewards):
            look(names - {name})


def _look_at_prompts(
    config: RunConfig, prompts: PromptSet, tokenizer: Tokenizer, directory: Path, findings: Findings
) -> None:
    rows = findings.look(draw, config, prompts, tokenizer, directory, first=0, count=len(prompts))
    if rows is None:
        return
    findings.seen.append(f"prompts: {_described(rows)} of {', '.join(config.data.runs) or config.data.source}")
    findings.doubt(compared, rows, prompts, tokenizer, directory, config.data)
    findings.doubts += doubts_of(prompts)
    if config.algorithm.learns_examples:
        examples = findings.look(check_examples, config, rows, prompts, tokenizer, directory)
        if examples is not None:
            findings.seen.append(examples[0])
            findings.doubts += examples[1]
    ends = findings.look(look_at_responses, config, directory, model_tokenizer(tokenizer), rows)
    if ends is not None:
        line, doubts = ends
        findings.seen.append(line)
        findings.doubts += doubts


def _look_at_teachers(
    config: RunConfig, teacher: TeacherConfig, prompts: PromptSet, directory: Path, findings: Findings
) -> None:
    """Look at the teachers, by local paths."""
    doubts = findings.look(check_teachers, config, teacher, directory, prompts)
    if doubts is not None and config.teacher is not None:
        findings.seen.append(f"teacher: {', '.join(config.teacher.models.values())}, with the policy's tokenizer")
        findings.doubts += doubts


def _look_at_draft_model(config: RunConfig, drafting: SpeculationConfig, directory: Path, findings: Findings) -> None:
    """Look at the draft model, by a local path."""
    doubts = findings.look(check_draft_model, config, drafting, directory)
    if doubts is not None:
        named = config.rollout.speculation.draft_model
        findings.seen.append(f"draft model: {named}, with the policy's tokenizer")
        findings.doubts += doubts


def _look_at_turns(
    config: RunConfig, turns: TurnsConfig, prompts: PromptSet, tokenizer: Tokenizer, directory: Path
) -> str:
    """Open the environment, or the agent, of the first prompt; returns a line about the look."""
    first = openings(config, prompts_at(prompts, config.data, 0, 1), config.run.seed, 0)
    draw(config, prompts, tokenizer, directory, first=0, count=1, openings=first)
    if turns.agent is not None:
        return f"turns: the first request of {turns.agent}, and the chat template with its tools"
    reset = f", and a reset of {turns.environment}" if first else ""
    return f"turns: the tools and their schemas, the chat template with tools{reset}"


def _look_at_evaluation(
    config: RunConfig,
    written: EvaluationConfig,
    inputs: LocalInputs,
    directory: Path | None,
    tokenizer: Tokenizer | None,
    findings: Findings,
) -> None:
    evaluation = findings.look(inputs.evaluation, written)
    held_out = (
        None if evaluation is None else findings.look(load_held_out, evaluation, config.rewards, turns=config.turns)
    )
    if evaluation is None or held_out is None or directory is None or tokenizer is None:
        return
    findings.doubts += doubts_of(held_out, "evaluation.data")
    rows = findings.look(draw_held_out, evaluation, held_out, tokenizer, config.rollout, directory)
    if rows is not None:
        findings.seen.append(f"evaluation: {_described(rows)} of {written.data.source}, and its rewards")
        findings.doubt(compared, rows, held_out, tokenizer, directory, evaluation.data, "evaluation.data")


def _check_turns(config: RunConfig) -> None:
    if config.turns is not None and config.data.source == ARITHMETIC:
        raise ValueError(
            f"data.source: value {ARITHMETIC!r}, whose prompts are text; allowed with turns: a file or a directory "
            "whose prompts are chat messages"
        )


def _check_places(config: RunConfig) -> None:
    """Raise ValueError if run.url is the place of the model or of the prompts."""
    for field, path in (("policy.path", config.policy.path), ("data.source", config.data.source)):
        try:
            is_same = place(config.run.url) == (LOCAL, *expanded(path).resolve().parts)
        except (ValueError, OSError):
            continue  # a path that cannot be one is refused where it is opened
        if is_same:
            raise ValueError(f"run.url: value {config.run.url!r}; allowed: another place than {field}")


def draw(
    config: RunConfig,
    prompts: PromptSet,
    tokenizer: Tokenizer,
    model_dir: Path,
    *,
    first: int,
    count: int,
    openings: Sequence[str | None] = (),
) -> list[PromptRow]:
    """The `count` prompts from running position `first` on, tokenised; raises PromptError for a misfit."""
    context = context_length(config.rollout, model_dir)
    rows = draw_prompts(
        prompts,
        tokenizer,
        config.data,
        first=first,
        count=count,
        context_length=context,
        max_completion_length=config.sampling.max_completion_length,
        openings=openings,
    )
    check_embedded(rows, vocabulary_size(model_dir))
    return rows


def check_held_out(
    config: RunConfig, model_dir: Path, tokenizer: Tokenizer, held: Collection[str] = frozenset()
) -> tuple[list[PromptRow], list[str]]:
    """The prompts of `evaluation` (opened, checked against the rewards, and tokenised), and doubts about the prompts.

    Both are [] without the section. held: the reward models that the run holds and need not be opened again. Raises
    PromptError and GradingError.
    """
    if config.evaluation is None:
        return [], []
    held_out = load_held_out(config.evaluation, config.rewards, held, turns=config.turns)
    rows = draw_held_out(config.evaluation, held_out, tokenizer, config.rollout, model_dir)
    return rows, compared(rows, held_out, tokenizer, model_dir, config.evaluation.data, "evaluation.data")


def _described(rows: list[PromptRow]) -> str:
    longest, chats = max(len(row.token_ids) for row in rows), sum(not isinstance(row.prompt, str) for row in rows)
    rendered = f", {chats} by the chat template" if chats else ""
    return f"all {len(rows)}, tokenised{rendered}, with up to {longest} tokens,"
