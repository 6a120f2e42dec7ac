"""Builds the parts of a scenario from a run's configuration, each figure with its source.

The sources are, in this order: measured in the run's last reports; configured in the section `forecast`; estimated from
data sheets. An estimate is not a measurement, so every figure is shown with its source.
"""

from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from resources.accelerators import accelerator
from resources.model_config import CONFIG, ModelConfigError, model_fields
from resources.pools import PoolConfig
from resources.prices import UnknownMachine, machine_price, request_prices
from resources.spot_trace import PROCESSES
from storage.forecast_records import ForecastInput
from storage.paths import expanded
from storage.records import TRAIN_POOL
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.engine_estimate import (
    Device,
    ModelSize,
    Points,
    prefill_tokens_per_s,
    responses_that_fit,
    size_from_config,
    step_points,
    train_s_per_token,
)
from tasks.forecasting.probe import NoProbe, PoolProbe, Probe
from tasks.forecasting.response_lengths import ResponseLengths
from tasks.forecasting.scenario import (
    AvailabilityScenario,
    LengthsScenario,
    Policy,
    PoolScenario,
    TrainerScenario,
    WorkScenario,
)
from tasks.forecasting.training_work import flops_per_parameter
from tasks.planning.division import groups_in_budget
from tasks.planning.step_time import StepTime

# Qwen3-8B's value: 36 layers x 8 heads x 128 x 2 values x 2 bytes are 147 kB for 8.2 billion parameters.
KV_BYTES_PER_PARAMETER = 18e-6
CHECKPOINT_BYTES_PER_PARAMETER = 12
VALUE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# From all of the trainer's machines to the store.
TRAIN_LINK_GBPS = 100.0
# Fewer losses say little about a rate.
LOSSES_MIN = 3
# A difference between versions as a share of a version's bytes, by learning rate (docs/guide/cost.md, Weights).
DELTA_SHARES = ((2e-6, 0.02), (float("inf"), 0.1))
# What says more about a trainer that the run has for a part of an iteration only.
NOT_SIMULATED = {
    "pod": "'pod' is not simulated; the run's reports tell how long machines were held",
    "shared": "'shared' is not simulated; see gleaner fleet admit --dry-run, and later gleaner fleet report",
}


@dataclass(frozen=True, kw_only=True)
class ForecastInputs:
    """pools: the crew's pools as configured. shown: every figure in words, with its source."""

    pools: tuple[PoolScenario, ...]
    trainer: TrainerScenario
    work: WorkScenario
    policy: Policy
    shown: tuple[ForecastInput, ...]


def gather(config: RunConfig, probe: Probe | NoProbe) -> ForecastInputs:
    """The inputs from which every setup of this configuration is simulated.

    Raises ValueError (LookupError for machines and accelerators), which names the missing or wrong field.
    """
    return _Gathering(config, probe).inputs()


class _Gathering:
    """Collects the figures, and a line about each."""

    def __init__(self, config: RunConfig, probe: Probe | NoProbe) -> None:
        self._config = config
        self._forecast = config.forecast
        self._probe = probe if isinstance(probe, Probe) else None
        self._shown: list[ForecastInput] = []
        if isinstance(probe, NoProbe):
            self._show("probe", "none: nothing is measured", probe.reason)
        self._lengths = self._response_lengths()
        self._work = self._planned_work()
        drawn = ResponseLengths(self._work, seed=0).lengths(0).astype(np.float64)
        self._mean = float(drawn.mean())
        # A token is decoded at the context of its moment, so long responses count by their tokens.
        self._context = self._forecast.prompt_tokens + float((drawn**2).sum() / drawn.sum()) / 2
        self._show("mean response", f"{self._mean:.0f} tokens", "of the lengths above")
        self._size, self._size_source = self._model_size()

    def inputs(self) -> ForecastInputs:
        pools = tuple(self._pool(name, pool) for name, pool in self._config.pools.rollout_pools.items())
        trainer = self._trainer()
        policy = self._policy()
        placement = self._config.trainer.placement
        if placement != "own":
            self._show("train: placement", "own", NOT_SIMULATED[placement])
        return ForecastInputs(pools=pools, trainer=trainer, work=self._work, policy=policy, shown=tuple(self._shown))

    def _show(self, name: str, value: str, source: str) -> None:
        self._shown.append(ForecastInput(name=name, value=value, source=source))

    def _response_lengths(self) -> LengthsScenario:
        forecast, cap = self._forecast, self._config.sampling.max_completion_length
        if self._probe is not None:
            self._show("response lengths", "of all graded responses", self._probe.source)
            return LengthsScenario(quantiles=self._probe.lengths, cap=cap)
        source = "configured (forecast.response_median, response_sigma)"
        median = forecast.response_median
        if median is None:
            median, source = cap / 4, "assumed: a quarter of sampling.max_completion_length"
        words = f"log-normal, median {median:.0f}, sigma {forecast.response_sigma:g}, at most {cap}"
        self._show("response lengths", words, source)
        return LengthsScenario(median=median, sigma=forecast.response_sigma, cap=cap)

    def _planned_work(self) -> WorkScenario:
        run, algorithm, forecast = self._config.run, self._config.algorithm, self._forecast
        prompts = run.num_prompts_per_step
        if algorithm.filter_groups:
            prompts = groups_in_budget(prompts, algorithm.filter_groups_budget)
            source = "all of algorithm.filter_groups_budget, which an iteration may not need"
            self._show("groups per iteration", str(prompts), source)
        in_dataset = forecast.prompts_in_dataset
        return WorkScenario(
            num_prompts_per_step=prompts,
            num_generations=run.num_generations,
            prompt_tokens=forecast.prompt_tokens,
            prompts_in_dataset=None if in_dataset is None else max(in_dataset, prompts),
            lengths=self._lengths,
            iterations=forecast.iterations_simulated,
        )

    def _model_size(self) -> tuple[ModelSize | None, str]:
        """The model's size and its source; None if nothing tells it. A caller that needs it raises."""
        forecast, path = self._forecast, expanded(self._config.policy.path) / CONFIG
        weight_bytes = VALUE_BYTES[self._config.rollout.dtype]
        parameters = None if forecast.parameters_billions is None else forecast.parameters_billions * 1e9
        kv, source = forecast.kv_bytes_per_token, "configured"
        if parameters is None and path.is_file():
            (parameters, of_config), source = size_from_config(_fields(path.parent)), f"counted from {path}"
            kv = kv or of_config
        if parameters is None:
            return None, ""
        if kv is None:
            kv, source = parameters * KV_BYTES_PER_PARAMETER, f"{source}; its cache assumed to be as Qwen3-8B's"
        words = f"{parameters / 1e9:.2f} billion" if parameters >= 1e8 else f"{parameters / 1e6:.2f} million"
        words += f" parameters, {kv:,.0f} bytes of cache per token"
        self._show("model", words, source)
        return ModelSize(parameters=parameters, weight_bytes=weight_bytes, kv_bytes_per_token=kv), source

    def _sized(self) -> ModelSize:
        if self._size is None:
            raise ValueError(
                "forecast.parameters_billions: missing; allowed: the model's size in billions, or a policy.path with a "
                "config.json on this machine"
            )
        return self._size

    @property
    def _in_turn(self) -> bool:
        """Whether one machine runs all tasks in turn, so that no machine has to be started."""
        return self._probe is not None and self._probe.in_turn

    def _device(self, name: str, pool: PoolConfig, named: str | None, gpus: int) -> Device | None:
        """The GPUs that an engine or the trainer runs on; None without GPUs. Raises LookupError for unknown ones."""
        if not gpus:
            return None
        forecast, found = self._forecast, named or pool.accelerator
        if found is None:
            with suppress(UnknownMachine):
                found = machine_price(pool.machine).accelerator
        try:
            known = accelerator(found or "")
        except LookupError as error:
            raise LookupError(f"pools.{name}: {error}; or forecast.accelerator_*, the most similar of them") from None
        return Device(
            accelerator=known,
            gpus=gpus,
            bandwidth_efficiency=forecast.bandwidth_efficiency,
            mfu=forecast.mfu,
        )

    def _engine_device(self, name: str, pool: PoolConfig, named: str | None, *, is_timed: bool) -> Device | None:
        """The GPUs of one engine, whatever else its machine has; None if they are unknown and not needed.

        is_timed: its step times are known, so none has to be estimated.
        """
        rollout = self._config.rollout
        per_engine = 1 if rollout.engine == "torch" else rollout.vllm.tensor_parallel_size
        try:
            return self._device(name, pool, named, min(pool.gpus, per_engine))
        except LookupError:
            if not is_timed:
                raise
            return None

    def _engine(
        self, name: str, pool: PoolConfig, named: str | None, configured: dict[str, float] | None
    ) -> tuple[Points, int, float]:
        """(step times, responses at once, prefill tokens per second) of one engine of a pool."""
        limit, vllm = self._config.rollout.max_responses_in_flight, self._config.rollout.vllm
        probed = None if self._probe is None else self._probe.pools.get(name)
        is_timed = configured is not None or (probed is not None and bool(probed.step_s))
        device = self._engine_device(name, pool, named, is_timed=is_timed)
        if device is not None and self._size is not None:
            try:
                fit = responses_that_fit(
                    self._size, device, self._context, vllm.gpu_memory_utilization, vllm.kv_cache_memory_bytes
                )
            except ValueError as error:
                raise ValueError(f"pools.{name}: {error}") from None
            limit = min(limit, fit)
        if probed is not None and self._probe is not None and probed.step_s:
            points, source = probed.step_s, self._probe.source
        elif configured is not None:
            points = tuple(sorted((int(batch), step_s) for batch, step_s in configured.items()))
            source = "configured (forecast.step_s)"
        elif device is not None:
            points = step_points(self._sized(), device, limit, self._context)
            source = f"estimated: {device.gpus} x {device.accelerator.name} ({device.accelerator.source}), "
            source += f"{device.bandwidth_efficiency:.0%} of bandwidth, {device.mfu:.0%} of arithmetic"
        else:
            raise ValueError(
                f"pools.{name}.gpus: value 0, and no step time is known; allowed: at least 1, forecast.step_s, or a "
                "run.url with a committed iteration"
            )
        curve = StepTime(points)
        words = f"{curve.tokens_per_s(limit):.0f} tokens/s with {limit} responses, {1 / curve.step_s(1):.0f} with one"
        self._show(f"{name}: engine", words, source)
        if device is not None and self._size is not None:
            return points, limit, prefill_tokens_per_s(self._size, device)
        return points, limit, curve.tokens_per_s(limit)

    def _pool(self, name: str, pool: PoolConfig) -> PoolScenario:
        forecast = self._forecast
        # The configured data sheet and step times are those of the first pool.
        is_first = name == "rollout"
        sheet, step_s = (forecast.accelerator_rollout, forecast.step_s) if is_first else (None, None)
        points, limit, prefill = self._engine(name, pool, sheet, step_s)
        probed = None if self._probe is None else self._probe.pools.get(name)
        price = "configured (usd_per_hour)" if pool.usd_per_hour is not None else f"price table, {pool.machine}"
        self._show(f"{name}: price", f"{pool.price_usd_per_h:.2f} $/h of a slot", price)
        return PoolScenario(
            name=name,
            interruptible=pool.interruptible,
            count=pool.count,
            count_min=getattr(pool, "count_min", 0),
            usd_per_h=pool.price_usd_per_h,
            gpus=pool.gpus,
            responses_max=limit,
            step_s=points,
            prefill_tokens_per_s=prefill,
            start_s=0.0 if self._in_turn else forecast.start_s,
            process_s=self._process_s(name, probed),
            link_gbps=forecast.link_gbps,
            egress_usd_per_gb=getattr(pool, "egress_usd_per_gb", 0.0),
            availability=self._availability(name, probed) if pool.interruptible else None,
        )

    def _process_s(self, name: str, probed: PoolProbe | None) -> float:
        if probed is None or probed.start_s is None or self._probe is None:
            words = f"machine {self._forecast.start_s:g} s, process {self._forecast.process_s:g} s"
            self._show(f"{name}: start", words, "configured (forecast.start_s, process_s)")
            return self._forecast.process_s
        machine = "no machine" if self._in_turn else f"machine {self._forecast.start_s:g} s (configured)"
        words = f"{machine}, process until weights are in place {probed.start_s:.1f} s"
        self._show(f"{name}: start", words, self._probe.source)
        pull_s = self._weights()[1] * 8 / 1e9 / self._forecast.link_gbps
        return max(0.0, probed.start_s - pull_s)

    def _availability(self, name: str, probed: PoolProbe | None) -> AvailabilityScenario:
        forecast = self._forecast
        if forecast.trace_path is not None:
            words = f"{forecast.trace_path}, {forecast.loss_rate_factor:g} times as fast"
            self._show(f"{name}: losses", words, "configured (forecast.trace_path)")
            return AvailabilityScenario(path=forecast.trace_path, rate_factor=forecast.loss_rate_factor)
        process = PROCESSES[forecast.loss_process]
        if probed is not None and self._probe is not None and probed.losses >= LOSSES_MIN:
            per_h = probed.losses / probed.machine_h
            words = (
                f"{per_h:.2f} per machine hour ({probed.losses} in {probed.machine_h:.1f} h), as {process.name} loses"
            )
            self._show(f"{name}: losses", words, self._probe.source)
            factor = per_h / process.losses_per_node_h
            return AvailabilityScenario(process=process.name, rate_factor=factor)
        per_h = process.losses_per_node_h * forecast.loss_rate_factor
        words = f"{per_h:.2f} per machine hour, {process.name} x {forecast.loss_rate_factor:g}"
        self._show(f"{name}: losses", words, f"another kind of machine's: {process.source}")
        return AvailabilityScenario(process=process.name, rate_factor=forecast.loss_rate_factor)

    def _trainer(self) -> TrainerScenario:
        config, pool, trainer = self._config, self._config.pools.train, self._config.trainer
        processes = engines = trainer.nnodes * trainer.nproc_per_node
        try:
            points, limit, prefill = self._engine(TRAIN_POOL, pool, self._forecast.accelerator_train, None)
        except (ValueError, LookupError) as error:
            # Only seeding depends on this; the scenario refuses a configuration that needs it.
            self._show(f"{TRAIN_POOL}: engine", "none: it does not generate", str(error))
            engines, points, limit, prefill = 0, ((1, 1.0),), 1, 1.0
        usd_per_h = pool.price_usd_per_h * trainer.nnodes
        price = "configured (usd_per_hour)" if pool.usd_per_hour is not None else f"price table, {pool.machine}"
        self._show(f"{TRAIN_POOL}: price", f"{usd_per_h:.2f} $/h of {trainer.nnodes} x {pool.machine}", price)
        # One process of the trainer uses one GPU, however many its machine has.
        per_token = self._train_s_per_token(gpus=processes if pool.gpus else 0)
        publish_s, control_s = self._between_s()
        return TrainerScenario(
            engines=engines,
            usd_per_h=usd_per_h,
            gpus=float(trainer.nnodes * pool.gpus),
            responses_max=limit,
            step_s=points,
            prefill_tokens_per_s=prefill,
            process_s=self._forecast.process_s,
            train_s_per_token=per_token,
            train_fixed_s=publish_s,
            control_s=control_s,
            waits=not self._in_turn,
            micro_batch_responses=config.run.num_generations,
        )

    def _train_s_per_token(self, gpus: int) -> float:
        forecast, pool = self._forecast, self._config.pools.train
        if self._probe is not None and self._probe.train_s_per_token is not None:
            found, source = self._probe.train_s_per_token, self._probe.source
        elif forecast.train_s_per_token is not None:
            found, source = forecast.train_s_per_token, "configured (forecast.train_s_per_token)"
        else:
            device = self._device(TRAIN_POOL, pool, forecast.accelerator_train, gpus)
            if device is None:
                raise ValueError(
                    "pools.train.gpus: value 0, and no speed of training is known; allowed: at least 1, "
                    "forecast.train_s_per_token, or a run.url with a committed iteration"
                )
            operations = flops_per_parameter(self._config)
            # The prompt is trained on with every response.
            per_generated = (forecast.prompt_tokens + self._mean) / self._mean
            found = train_s_per_token(self._sized(), device, operations) * per_generated
            source = f"estimated: {operations:g} operations per parameter and token, {device.gpus} x "
            source += f"{device.accelerator.name} at {device.mfu:.0%}"
        self._show(f"{TRAIN_POOL}: step", f"{1 / found:.0f} generated tokens/s", source)
        return found

    def _between_s(self) -> tuple[float, float]:
        """Seconds between two iterations: to publish the weights, and to conclude and plan."""
        if self._probe is not None and self._probe.train_fixed_s is not None:
            publish_s, control_s = self._probe.train_fixed_s, self._probe.control_s
            self._show("between iterations", f"{publish_s + control_s:.1f} s", self._probe.source)
            return publish_s, control_s
        weights, _ = self._weights()
        # The checkpoint of adapters is small.
        trains_all = self._size is not None and self._config.lora is None
        state = CHECKPOINT_BYTES_PER_PARAMETER * self._sized().parameters if trains_all else 0.0
        publish_s = (weights + state) * 8 / 1e9 / TRAIN_LINK_GBPS
        source = f"estimated: checkpoint and weights at {TRAIN_LINK_GBPS:g} Gbit/s, and forecast.control_s"
        self._show("between iterations", f"{publish_s + self._forecast.control_s:.0f} s", source)
        return publish_s, self._forecast.control_s

    def _weights(self) -> tuple[float, float]:
        """Bytes of a whole version, and of a difference between two versions."""
        whole = 0.0 if self._size is None else self._size.bytes
        rate = self._config.optimizer.learning_rate
        return whole, whole * next(share for limit, share in DELTA_SHARES if rate <= limit)

    def _policy(self) -> Policy:
        config, (whole, delta), requests = self._config, self._weights(), request_prices()
        recurs = config.forecast.prompts_in_dataset is not None and config.planning.length_predictor != "none"
        return Policy(
            planning=config.planning,
            streaming=config.algorithm.streams,
            in_order=config.algorithm.micro_batch_order == "plan",
            keep_order=config.algorithm.filter_groups,
            one_step_off=config.algorithm.max_staleness > 0,
            predictor="history" if recurs else "none",
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
