"""Estimates of the seconds of an engine and a trainer, from a model's size and a data sheet, without a measurement.

A decode step reads the weights once and each response's cache once, and multiplies by every parameter for every
response (Williams, Waterman and Patterson, "Roofline", CACM 52 (2009)). Besides, a step and each of its layers take a
constant time, and with tensor parallelism the GPUs of an engine add up their parts twice in every layer (Shoeybi et
al., arXiv 1909.08053, section 3). `python -m benchmarks.step_times` shows the measurements behind the constants.
Training takes 6 operations per parameter and token, 8 if activations are computed twice (Kaplan et al., arXiv
2001.08361, section 2.1; Korthikanti et al., arXiv 2205.05198). Peaks are multiplied by an efficiency. A probe's figures
replace every estimate.
"""

import math
from dataclasses import dataclass

from resources.accelerators import Accelerator
from resources.model_size import ModelSize

# Activations are bfloat16.
ACTIVATION_BYTES = 2
# Seconds that a decode step and each of its layers take besides reading and multiplying: the scheduler, the sampler,
# and kernels that are too short to fill a GPU. Of sums over GPUs: what each takes however little it sends.
STEP_S = 1.5e-3
LAYER_S = 30e-6
SUM_S = 25e-6
SUMS_PER_LAYER = 2
# The share of the bandwidth on the data sheet that decoding reaches, and where another was measured.
BANDWIDTH_REACHED = 0.76
BANDWIDTH_REACHED_ON = {"H20": 0.44}
# The share of the arithmetic on the data sheet that training, prefill and large batches reach.
MFU = 0.35
Points = tuple[tuple[int, float], ...]


@dataclass(frozen=True, kw_only=True)
class Device:
    """The accelerators of one copy of a model (tensor parallel).

    Attributes:
        accelerator: data sheet of one accelerator.
        gpus: number of accelerators.
        bandwidth_efficiency: share of the data sheet's bandwidth reached.
        mfu: share of the data sheet's arithmetic reached.
    """

    accelerator: Accelerator
    gpus: int
    bandwidth_efficiency: float
    mfu: float

    @property
    def bytes_per_s(self) -> float:
        return self.gpus * self.accelerator.bandwidth_bytes_per_s * self.bandwidth_efficiency

    @property
    def flops(self) -> float:
        return self.gpus * self.accelerator.flops * self.mfu


def bandwidth_reached(accelerator: Accelerator) -> float:
    """The share of the accelerator's bandwidth reached in decoding, by published measurements."""
    return BANDWIDTH_REACHED_ON.get(accelerator.name, BANDWIDTH_REACHED)


def assumed_layers(parameters: float) -> int:
    """The layers of a dense model of a given size without a known number: Qwen2.5's seven sizes within a factor 1.5."""
    return max(1, round(30 * math.pow(parameters / 3e9, 0.3)))


def decode_step_s(model: ModelSize, device: Device, batch: int, context_tokens: float) -> float:
    """Seconds of a decoding step with a token for each of `batch` responses, at a mean context of `context_tokens`."""
    weights_s = model.multiplied * model.weight_bytes / device.bytes_per_s
    products_s = 2 * model.multiplied * batch / device.flops
    cache_s = batch * model.cache_bytes(context_tokens) / device.bytes_per_s
    constant_s = STEP_S + model.layers * LAYER_S
    if device.gpus > 1:
        constant_s += model.layers * SUMS_PER_LAYER * SUM_S
    return constant_s + max(weights_s, products_s) + cache_s + batch * sent_s_per_token(model, device)


def sent_s_per_token(model: ModelSize, device: Device) -> float:
    """Seconds of exchanging a token's values between the GPUs of an engine, summed over layers; 0 for one GPU.

    A sum over n GPUs sends 2 (n - 1) / n of the values over each link (ring all-reduce).
    """
    sent = 2 * (device.gpus - 1) / device.gpus * model.width * ACTIVATION_BYTES
    return model.layers * SUMS_PER_LAYER * sent / (device.accelerator.link_bytes_per_s * device.bandwidth_efficiency)


def step_points(model: ModelSize, device: Device, responses_max: int, context_tokens: float) -> Points:
    """The curve of step times at powers of two and at responses_max, for StepTime."""
    batches = sorted({*(1 << k for k in range(responses_max.bit_length())), responses_max})
    return tuple((batch, decode_step_s(model, device, batch, context_tokens)) for batch in batches)


def prefill_tokens_per_s(model: ModelSize, device: Device) -> float:
    """The rate of prefill: 2 operations per parameter and token, and what the GPUs of an engine exchange."""
    return 1 / (2 * model.multiplied / device.flops + sent_s_per_token(model, device))


def responses_that_fit(
    model: ModelSize,
    device: Device,
    context_tokens: float,
    memory_share: float,
    cache_bytes: float | None = None,
) -> int:
    """The number of caches of `context_tokens` tokens that fit beside the weights.

    Raises ValueError if no cache fits.

    Args:
        model: size of the model.
        device: the engine's accelerators.
        context_tokens: tokens in each cache.
        memory_share: share of memory for weights and cache.
        cache_bytes: bytes of each accelerator for the cache, in place of memory_share.
    """
    memory = device.gpus * device.accelerator.memory_bytes
    left = memory * memory_share - model.bytes
    if cache_bytes is not None:
        left = min(memory - model.bytes, device.gpus * cache_bytes)
    fit = int(left / model.cache_bytes(context_tokens))
    if fit < 1:
        raise ValueError(
            f"{device.gpus} x {device.accelerator.name} of an engine: {model.bytes / 1e9:.0f} GB of weights and one "
            f"response's cache do not fit in {memory_share:.0%} of {memory / 1e9:.0f} GB; allowed: more of them "
            "(rollout.vllm.tensor_parallel_size, and as many gpus), or larger ones"
        )
    return fit


def train_s_per_token(model: ModelSize, device: Device, flops_per_parameter: float) -> float:
    """Seconds of all the trainer's machines together per token trained."""
    return flops_per_parameter * model.parameters / device.flops
