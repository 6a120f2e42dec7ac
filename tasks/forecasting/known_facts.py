"""The facts for building a scenario: the configuration, the measurements, and the model's size."""

from dataclasses import dataclass, field

from resources.model_size import ModelSize
from storage.records.forecast_records import ForecastInput
from tasks.configuration.run_config import RunConfig
from tasks.forecasting.probe import Probe

FACTOR_BYTES = 4  # an adapter's values are published in float32
# A difference between versions as a share of a version's bytes, by learning rate (docs/guide/forecast.md).
DELTA_SHARES = ((2e-6, 0.02), (float("inf"), 0.1))


@dataclass(frozen=True, kw_only=True)
class KnownFacts:
    """The facts for building a scenario.

    Attributes:
        config: configuration of the run.
        probe: measurements of the run; None before the first committed iteration.
        size: size of the model; None if unknown.
        teachers: sizes of the teachers, as far as known.
        mean: mean tokens of a response.
        context: mean tokens before a decoded token.
        shown: every figure in words with its source, in the order of discovery.
    """

    config: RunConfig
    probe: Probe | None
    size: ModelSize | None
    mean: float
    context: float
    teachers: tuple[ModelSize, ...] = ()
    shown: list[ForecastInput] = field(default_factory=list)

    def show(self, name: str, value: str, source: str) -> None:
        """Add a figure to `shown`."""
        self.shown.append(ForecastInput(name=name, value=value, source=source))

    def sized(self) -> ModelSize:
        """The model's size; raises ValueError if the size is unknown."""
        if self.size is None:
            raise ValueError(
                "forecast.parameters_billions: missing; allowed: the model's size in billions, or a policy.path with a "
                f"config.json on this machine, or an id on the hub (policy.path: value {self.config.policy.path!r})"
            )
        return self.size

    @property
    def in_turn(self) -> bool:
        """True if a single machine runs all tasks in turn and no further machine starts."""
        return self.probe is not None and self.probe.in_turn

    @property
    def gpus_per_engine(self) -> int:
        """The GPUs over which an engine divides the model."""
        rollout = self.config.rollout
        return rollout.vllm.tensor_parallel_size if rollout.engine == "vllm" else 1

    @property
    def publishes_adapters(self) -> bool:
        return self.config.lora is not None and self.config.lora.publish == "adapter"

    @property
    def weights(self) -> tuple[float, float]:
        """(bytes of a whole version, bytes that a member with the previous version reads)."""
        whole, lora = 0.0 if self.size is None else self.size.bytes, self.config.lora
        if self.size is not None and lora is not None and self.publishes_adapters:
            return whole, FACTOR_BYTES * self.size.adapter_values(lora.rank, lora.target_modules)
        rate = self.config.optimizer.learning_rate
        return whole, whole * next(share for limit, share in DELTA_SHARES if rate <= limit)
