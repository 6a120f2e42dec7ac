"""The section `forecast`: the model's size, the expected lengths, the machines."""

from dataclasses import dataclass
from typing import Annotated

from pydantic import ConfigDict, Field

STRICT = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
# Bounds far beyond any machine. Outside of them a simulation does not end, or its figures leave what floats can hold.
_Above0 = Annotated[float, Field(gt=0, le=1e12)]
_Seconds = Annotated[float, Field(ge=0, le=86_400)]
_StepSeconds = Annotated[float, Field(ge=1e-5, le=10)]
_Batch = Annotated[str, Field(pattern=r"^[1-9][0-9]{0,5}$")]


# Standard deviation of the natural logarithm of lengths.
RESPONSE_SIGMA = 0.8
# From the store to a member's machine, in Gbit/s.
LINK_GBPS = 10.0
# Seconds until vLLM 0.32.0 was ready on one H200, with the shape of Qwen2.5-0.5B, on 2026-11-27: 50 to 66 with full
# caches of compiled code, 74 with empty ones; with batch-invariant kernels it took its first request after some 85.
VLLM_START_S, VLLM_COLD_START_S, VLLM_INVARIANT_START_S = 60.0, 74.0, 85.0


@dataclass(frozen=True, kw_only=True)
class ForecastConfig:
    """The figures of a forecast for which the run has no measured iteration; nothing here changes the run.

    Attributes:
        iterations: iterations of the whole run, including past ones.
        widths: members of the pool `rollout` to compare; empty: half, all and twice its `count`.
        parameters_billions: parameters of the model; None: from config.json at policy.path.
        kv_bytes_per_token: bytes of the model's cache per token, all layers together; None: from config.json.
        step_s: batch size to seconds of a decode step of a member of `rollout`, if measured; None: estimated.
        train_s_per_token: seconds per generated token, all machines of the trainer together; None: estimated.
        lengths_path: a file of response lengths, as in tasks.forecasting.response_lengths; None: a log-normal
            distribution with sigma RESPONSE_SIGMA.
        response_median: the distribution's median, in tokens; None: a quarter of the longest response.
        prompt_tokens: mean tokens of a prompt.
        start_s: seconds until a process can start on a new machine: provisioning and image.
    """

    __pydantic_config__ = STRICT
    iterations: Annotated[int, Field(ge=1, le=100_000)] = 100
    widths: tuple[Annotated[int, Field(ge=1, le=10_000)], ...] = ()
    parameters_billions: Annotated[float, Field(ge=1e-6, le=1e6)] | None = None
    kv_bytes_per_token: _Above0 | None = None
    step_s: Annotated[dict[_Batch, _StepSeconds], Field(min_length=1)] | None = None
    train_s_per_token: Annotated[float, Field(ge=1e-12, le=60)] | None = None
    lengths_path: str | None = None
    response_median: Annotated[float, Field(gt=0, le=1e9)] | None = None
    prompt_tokens: Annotated[int, Field(ge=1)] = 256
    start_s: _Seconds = 180.0
