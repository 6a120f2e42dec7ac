"""Builds the parts of a scenario from a run's configuration, each figure with its source.

The sources are, in this order: measured in the run's last reports; configured in the section `forecast`; estimated from
data sheets. Every figure is shown with its source, so that a reader can tell an estimate from a measurement.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from resources.model_config import CONFIG, ModelConfigError, model_fields
from resources.model_size import ModelSize, size_from_config
from resources.pools import PoolConfig
from resources.prices import request_prices
from storage.paths import expanded
from storage.records.forecast_records import ForecastInput
from tasks.configuration.forecast import RESPONSE_SIGMA, VLLM_COLD_START_S, VLLM_INVARIANT_START_S, VLLM_START_S
from tasks.configuration.rollout import OUR_ENGINES
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.crew_inputs import CrewPool, crew_pools
from tasks.forecasting.engine_estimate import assumed_layers
from tasks.forecasting.known_facts import KnownFacts
from tasks.forecasting.probe import NoProbe, Probe
from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.scenario import LengthsScenario, Policy, ToolsScenario, TrainerScenario, WorkScenario
from tasks.forecasting.scorer_inputs import scorers_scenario
from tasks.forecasting.scorers import ScorersScenario
from tasks.forecasting.trainer_inputs import state_s, trainer_scenario
from tasks.hub.policy_size import HubModel, config_folder, policy_of
from tasks.hub.repositories import HubError, names_repository
from tasks.planning.division import groups_in_budget
from tasks.sampling.engines.choose import engine_settings

# Iterations simulated of each setup; the remaining ones are scaled.
ITERATIONS_SIMULATED = 12
# The column, or field, of a file of lengths.
LENGTHS_COLUMN = "response_tokens"
# Of an answer of a tool, which no report counts.
OBSERVATION_TOKENS = 256
# Qwen3-8B's value: 36 layers x 8 heads x 128 x 2 values x 2 bytes are 147 kB for 8.2 billion parameters.
KV_BYTES_PER_PARAMETER = 18e-6
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """The inputs of every setup's simulation.

    Attributes:
        pools: pools of the crew, in the configuration's order.
        trainer: the trainer's machines.
        state_s: seconds of restoring and writing the trainer's state in an iteration (`trainer_inputs.state_s`).
        work: groups, lengths and tools.
        policy: rules of the run.
        scorers: the scorers of `teacher.pool`; None without.
        shown: every figure in words, with its source.
    """

    pools: tuple[CrewPool, ...]
    trainer: TrainerScenario
    state_s: float
    work: WorkScenario
    policy: Policy
    scorers: ScorersScenario | None
    shown: tuple[ForecastInput, ...]


def gather(config: RunConfig, probe: Probe | NoProbe) -> ForecastInputs:
    """The inputs for simulating every setup of a configuration.

    Raises ValueError (LookupError for machines and accelerators) with the missing or wrong field.
    """
    if config.algorithm.learns_examples:
        kind = config.algorithm.kind
        raise ValueError(f"algorithm.kind: value {kind!r}; allowed in a forecast: 'rl', because examples need no crew")
    shown: list[ForecastInput] = []
    if isinstance(probe, NoProbe):
        shown.append(ForecastInput(name="probe", value="none: nothing is measured", source=probe.reason))
    measured = probe if isinstance(probe, Probe) else None
    lengths = _response_lengths(config, measured, shown)
    work = _planned_work(config, lengths, _tools(config, measured, shown), shown)
    drawn = ResponseLengths(work, seed=0).lengths(0).astype(np.float64)
    mean = float(drawn.mean())
    shown.append(ForecastInput(name="mean response", value=f"{mean:.0f} tokens", source="of the lengths above"))
    size, teachers = _model_size(config, measured, shown), tuple(_teacher_sizes(config, shown))
    facts = KnownFacts(
        config=config,
        probe=measured,
        size=size,
        teachers=() if config.teacher is None or config.teacher.pool else teachers,
        mean=mean,
        # A token is decoded at the context of its moment, so long responses count by their tokens.
        context=config.forecast.prompt_tokens + float((drawn**2).sum() / drawn.sum()) / 2,
        shown=shown,
    )
    _show_weights(facts)
    pools, trainer, scorers = crew_pools(facts), trainer_scenario(facts), scorers_scenario(facts, teachers)
    shown.extend(_vllm_costs(config))
    policy = _policy(facts)
    return ForecastInputs(
        pools=pools,
        trainer=trainer,
        state_s=state_s(facts),
        work=work,
        policy=policy,
        scorers=scorers,
        shown=tuple(facts.shown),
    )


def _vllm_costs(config: RunConfig) -> Iterator[ForecastInput]:
    """The known costs of vLLM's start and steps on a GPU that no figure includes."""
    rollout = engine_settings(config)
    if not any(pool.gpus for pool in _crew(config)):
        return
    if rollout.vllm.batch_invariant is True:
        cost = (
            "on; they cost decoding speed, which is not measured and not in these figures, and vLLM's first request "
            f"was taken after {VLLM_INVARIANT_START_S:g} s on an H200, instead of {VLLM_START_S:g}"
        )
        yield ForecastInput(name="batch-invariant kernels", value=cost, source="rollout.vllm.batch_invariant")
    elif rollout.vllm.cache_dir is None:
        cost = (
            f"die with the pod: vLLM took {VLLM_COLD_START_S:g} s to start on an H200 with empty caches, and "
            f"{VLLM_START_S:g} with full ones"
        )
        yield ForecastInput(name="caches of compiled code", value=cost, source="rollout.vllm.cache_dir")


def _crew(config: RunConfig) -> list[PoolConfig]:
    """The pools whose engine may be vLLM."""
    return [] if config.rollout.engine in OUR_ENGINES else list(config.pools.rollout_pools.values())


def _response_lengths(config: RunConfig, probe: Probe | None, shown: list[ForecastInput]) -> LengthsScenario:
    forecast, cap = config.forecast, config.sampling.max_completion_length
    if probe is not None:
        found = LengthsScenario(quantiles=probe.lengths, cap=cap)
        words, source = "of all graded responses", probe.source
    elif forecast.lengths_path is not None:
        found = LengthsScenario(path=forecast.lengths_path, column=LENGTHS_COLUMN, cap=cap)
        words, source = f"{forecast.lengths_path}, at most {cap}", "configured (forecast.lengths_path)"
    else:
        source = "configured (forecast.response_median)"
        median = forecast.response_median
        if median is None:
            median, source = cap / 4, "assumed: a quarter of sampling.max_completion_length"
        words = f"log-normal, median {median:.0f}, sigma {RESPONSE_SIGMA:g}, at most {cap}"
        found = LengthsScenario(median=median, sigma=RESPONSE_SIGMA, cap=cap)
    shown.append(ForecastInput(name="response lengths", value=words, source=source))
    return found


def _tools(config: RunConfig, probe: Probe | None, shown: list[ForecastInput]) -> ToolsScenario | None:
    """The tools for which responses wait; None without tools, and without a measurement."""
    if config.turns is None:
        return None
    if probe is None or probe.tools is None:
        shown.append(ForecastInput(name="tools", value="taken to answer at once", source="nothing is measured"))
        return None
    answers, answer_s = probe.tools.answers, probe.tools.answer_s
    words = f"{answers:.1f} answers in a response, of {answer_s:.2f} s and {OBSERVATION_TOKENS} tokens each, on average"
    shown.append(ForecastInput(name="tools", value=words, source=f"{probe.source}; tokens: assumed"))
    return ToolsScenario(
        answers=answers,
        answers_max=config.turns.turns_max,
        answer_s=answer_s,
        observation_tokens=OBSERVATION_TOKENS,
    )


def _planned_work(
    config: RunConfig, lengths: LengthsScenario, tools: ToolsScenario | None, shown: list[ForecastInput]
) -> WorkScenario:
    run, algorithm, forecast = config.run, config.algorithm, config.forecast
    prompts = run.num_prompts_per_step
    if algorithm.filter_groups:
        prompts = groups_in_budget(prompts, algorithm.filter_groups_budget)
        source = "all of algorithm.filter_groups_budget, which an iteration may not need"
        shown.append(ForecastInput(name="groups per iteration", value=str(prompts), source=source))
    return WorkScenario(
        num_prompts_per_step=prompts,
        num_generations=run.num_generations,
        prompt_tokens=forecast.prompt_tokens,
        lengths=lengths,
        tools=tools,
        iterations=ITERATIONS_SIMULATED,
    )


def _model_folder(config: RunConfig, probe: Probe | None) -> Path:
    """The folder of the model's config.json; from the hub, config.json alone is fetched.

    Raises HubError for a run without measurements; measurements can do without the model's size.
    """
    if names_repository(config.policy.path):
        try:
            return config_folder(config, policy_of(config))
        except HubError as error:
            if probe is None:
                raise HubError(f"{error}; a forecast also does with forecast.parameters_billions") from None
    return expanded(config.policy.path)


def _model_size(config: RunConfig, probe: Probe | None, shown: list[ForecastInput]) -> ModelSize | None:
    """The model's size; None if unknown (KnownFacts.sized then raises). Raises HubError."""
    forecast = config.forecast
    weight_bytes = VALUE_BYTES[config.rollout.dtype]
    if forecast.parameters_billions is not None:
        parameters, source = forecast.parameters_billions * 1e9, "configured"
        kv = forecast.kv_bytes_per_token
        if kv is None:
            kv, source = parameters * KV_BYTES_PER_PARAMETER, "configured; its cache assumed to be as Qwen3-8B's"
        found = ModelSize(
            parameters=parameters,
            weight_bytes=weight_bytes,
            kv_bytes_per_token=kv,
            layers=assumed_layers(parameters),
        )
        source += "; layers assumed from the size"
    elif (path := _model_folder(config, probe) / CONFIG).is_file():
        found, source = size_from_config(_fields(path.parent), weight_bytes), f"counted from {path}"
        if forecast.kv_bytes_per_token is not None:
            found = replace(found, kv_bytes_per_token=forecast.kv_bytes_per_token, windowed_layers=0)
    else:
        return None
    billions = found.parameters / 1e9
    words = f"{billions:.2f} billion" if billions >= 0.1 else f"{billions * 1000:.2f} million"
    if found.windowed_layers:
        source += f"; {found.windowed_layers} layers cache at most {found.window} tokens"
    words += f" parameters in {found.layers} layers, {found.kv_bytes_per_token:,.0f} bytes of cache per token"
    shown.append(ForecastInput(name="model", value=words, source=source))
    return found


def _teacher_sizes(config: RunConfig, shown: list[ForecastInput]) -> Iterator[ModelSize]:
    """The size of each teacher whose config.json is at hand; further ones are shown as left out."""
    if config.teacher is None:
        return
    for name, path in config.teacher.models.items():
        field = config.teacher.field_of(name)
        try:
            on_hub = names_repository(path)
            model = HubModel(path, config.teacher.revision, field)
            folder = config_folder(config, model) if on_hub else expanded(path)
            size = size_from_config(model_fields(folder), VALUE_BYTES[config.trainer.dtype])
        except ValueError as error:
            source = str(error).replace("policy.path", field)
            shown.append(ForecastInput(name=field, value="unknown: left out of memory and time", source=source))
            continue
        words = f"{size.parameters / 1e9:.2f} billion parameters, without training"
        shown.append(ForecastInput(name=field, value=words, source=f"counted from {folder / CONFIG}"))
        yield size


def _show_weights(facts: KnownFacts) -> None:
    """Show the bytes that a member pulls: a whole version once, and then the published part of each version."""
    if facts.size is None:
        return
    (whole, published), lora = facts.weights, facts.config.lora
    words = f"{_bytes(whole)} whole, {_bytes(published)} for each version after it"
    if lora is not None and facts.publishes_adapters:
        source = f"counted: float32 factors of rank {lora.rank} (lora.publish 'adapter')"
    else:
        source = f"assumed: differences of {published / whole:.0%}, by optimizer.learning_rate"
    facts.show("weights", words, source)


def _bytes(size: float) -> str:
    for least, unit in ((1e9, "GB"), (1e6, "MB")):
        if size >= least:
            return f"{size / least:.1f} {unit}"
    return f"{size / 1e3:.1f} kB"


def _policy(facts: KnownFacts) -> Policy:
    config, (whole, delta), requests = facts.config, facts.weights, request_prices(facts.config.run.url)
    return Policy(
        planning=config.planning,
        streaming=config.algorithm.streams,
        in_order=config.in_plan_order,
        keep_order=config.algorithm.filter_groups,
        crew=config.rollout.crew,
        max_staleness=config.algorithm.max_staleness,
        flush_interval_s=config.rollout.flush_interval_s,
        heartbeat_interval_s=config.rollout.heartbeat_interval_s,
        claim_ttl_s=config.rollout.claim_ttl_s,
        put_usd=requests.put_usd,
        get_usd=requests.get_usd,
        weights_bytes=whole,
        weights_delta_bytes=delta,
    )


def _fields(directory: Path) -> dict[str, object]:
    try:
        return model_fields(directory)
    except ModelConfigError as error:
        raise ValueError(f"policy.path: {error}") from None
