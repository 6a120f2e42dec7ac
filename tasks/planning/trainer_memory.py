"""The memory that training takes: bytes per parameter of the state, and the activations of a pass. Pure.

`check`, the forecast and fleets ask this module alone. State and activations are estimates for a dense decoder with a
gated feed-forward block and an attention that stores no scores.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from resources.accelerators import Accelerator
from resources.model_size import ModelSize
from tasks.configuration.example_clashes import group_size
from tasks.configuration.lora import LoraConfig
from tasks.configuration.optimizer import OptimizerConfig, OptimizerName
from tasks.configuration.run_config import RunConfig

_FLOAT32, _HALF = 4, 2
# Codes of a byte and a float32 scale for each 64 values, of two moments (tasks.learning.optimizer_rules).
_MOMENTS_8BIT = 2 * (1 + _FLOAT32 / 64)
# What a logit is counted with where the size of a chunk is chosen, and the chunk's share of a GPU's memory
# (tasks.learning.token_logprobs); and the most that it takes, as each chunk is dropped before the next is computed.
_LOGIT_PEAK_BYTES = 12
_LOGIT_BYTES, _CHUNK_BYTES_MIN, _CHUNK_BYTES_MAX, _CHUNK_SHARE = 16, 1 << 28, 1 << 31, 1 / 32
# Of a GPU's memory: CUDA's context and fragments take the rest; and beside a state, activations do at the least.
USABLE_SHARE, STATE_SHARE_MAX = 0.95, 0.9
_PROCESSES_MAX = 1024
# Of a token in a teacher's head: its id (int64) and log-prob, twice where the parts of a pass are joined; and in the
# policy's pass with the derivative of the log-prob (tasks.learning.token_objective).
_SCORE_BYTES, _TERM_BYTES = 2 * (8 + _FLOAT32), 8 + 2 * _FLOAT32


def moment_bytes(name: OptimizerName, outer_share: float = 0.0) -> float:
    """Bytes per trained parameter of the optimizer's state; outer_share: of parameters in embeddings and heads."""
    adamw = 2.0 * _FLOAT32
    return {
        "adamw": adamw,
        "adamw_8bit": _MOMENTS_8BIT,
        "muon": outer_share * adamw + (1 - outer_share) * _FLOAT32,
    }[name]


def kept_bytes(optimizer: OptimizerConfig) -> float:
    """Bytes per trained parameter of a checkpoint and of a resident state: float32 values and the optimizer's state."""
    return _FLOAT32 + moment_bytes(optimizer.name)


@dataclass(frozen=True, kw_only=True)
class TrainerMemory:
    """The memory of a trainer.

    Attributes:
        state: bytes of the state on the devices of all processes together, with teachers.
        teachers: bytes of `state` that are weights of teachers.
        activations: bytes of one process in its largest pass, of the policy or of a teacher.
        offloaded: bytes on the hosts of all processes together.
        pass_tokens: tokens of the largest pass.
    """

    state: float
    teachers: float
    activations: float
    offloaded: float
    pass_tokens: int

    def of_each(self, processes: int) -> float:
        """Bytes on the device of each process."""
        return self.state / processes + self.activations


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The devices of a trainer, and what the configuration does not tell of the models on them.

    Attributes:
        device_bytes: memory of a device; the head's chunks take a share.
        processes: number of processes, each with a device of its own.
        stored_bytes: bytes per parameter in the model's files; frozen weights under adapters keep a dtype of the files
            that is larger than the compute dtype.
        teachers: sizes of the teachers, which stay on the devices, divided among the processes as the policy is.
    """

    device_bytes: float
    processes: int = 1
    stored_bytes: int = _HALF
    teachers: tuple[ModelSize, ...] = ()


def trainer_memory(config: RunConfig, size: ModelSize, machine: Machine) -> TrainerMemory:
    """The memory of a configuration's trainer on the given machine."""
    optimizers = [config.optimizer] + [config.critic.optimizer] * config.algorithm.estimator.needs_critic
    trained = [size.parameters] * len(optimizers)
    if config.lora is not None:
        trained[0] = size.adapter_values(config.lora.rank, config.lora.target_modules)
    is_offloaded, outer = config.trainer.offload == "optimizer", size.outer / size.parameters
    state = moments = 0.0
    for optimizer, parameters in zip(optimizers, trained, strict=True):
        state += parameters * (2 * _FLOAT32 + _copy_bytes(config, machine))
        is_adapter = config.lora is not None and optimizer is config.optimizer
        moments += parameters * moment_bytes(optimizer.name, 0.0 if is_adapter else outer)
    state += size.parameters * _frozen_bytes(config, machine)
    teachers = frozen_bytes(config) * sum(teacher.parameters for teacher in machine.teachers)
    tokens, chunk_bytes = pass_tokens(config), head_chunk_bytes(machine.device_bytes)
    passes = [scoring_bytes(config, teacher, tokens, chunk_bytes) for teacher in machine.teachers]
    return TrainerMemory(
        state=state + teachers + (0.0 if is_offloaded else moments),
        teachers=teachers,
        activations=max(activation_bytes(config, size, tokens, chunk_bytes), *passes, 0.0),
        offloaded=moments if is_offloaded else 0.0,
        pass_tokens=tokens,
    )


def pass_tokens(config: RunConfig) -> int:
    """The most tokens of a pass: the limit of a micro-batch, or one response, or a pair of "dpo", if longer."""
    longest = longest_response(config)
    group = longest * group_size(config.algorithm, config.run.num_generations)
    least = group if config.algorithm.learns_pairs else longest
    return max(least, min(config.trainer.micro_batch_tokens_max, group * config.run.num_prompts_per_step))


def longest_response(config: RunConfig) -> int:
    """The most tokens of a prompt and its response, as far as the configuration tells."""
    limit = config.sampling.max_completion_length
    prompt = config.data.max_prompt_length or config.forecast.prompt_tokens
    context = config.rollout.context_length
    return limit + prompt if context is None else min(context, limit + prompt)


def activation_bytes(config: RunConfig, size: ModelSize, tokens: int, chunk_bytes: float) -> float:
    """Bytes of a process beside its state in a forward and backward pass of `tokens` tokens, at the peak.

    Without checkpointing the layers keep the inputs of their backward passes: of each norm the input in float32, and
    the output before and after the scale; queries, keys, values and the output of attention; four tensors of the
    feed-forward block. With checkpointing every layer keeps its input, and one layer at a time keeps the rest.

    Args:
        config: configuration of the run.
        size: the model's sizes.
        tokens: tokens of the pass.
        chunk_bytes: bytes by which the head chooses the size of its chunks.
    """
    value = frozen_bytes(config)
    hidden, queries, keys, inner = size.widths
    norm = hidden * (_FLOAT32 + 2 * value)
    layer = 2 * norm + value * (2 * queries + 2 * keys + 4 * inner)
    kept = size.layers * value * hidden if config.trainer.gradient_checkpointing else size.layers * layer
    # The head keeps the gradient of its weight, and sums it in float32.
    trains_head = config.lora is None
    head = trains_head * (size.outer - size.looked_up)
    at_head = head * _FLOAT32 + _logit_bytes(size, tokens, chunk_bytes) + tokens * (norm + 2 * value * hidden)
    at_head += tokens * _TERM_BYTES * _top_k(config)
    # Beside what a layer keeps: gradients of two tensors of the feed-forward block, and of the layer's ends.
    in_layer = tokens * value * (2 * inner + 2 * hidden)
    if config.trainer.gradient_checkpointing:
        in_layer += tokens * layer
    return tokens * kept + head * value + max(at_head, in_layer)


def scoring_bytes(config: RunConfig, teacher: ModelSize, tokens: int, chunk_bytes: float) -> float:
    """Bytes of a process beside its state while a teacher scores `tokens` tokens; arguments as in `activation_bytes`.

    Nothing is kept for a backward pass: a layer has its input, and its attention or its feed-forward block.
    """
    value = frozen_bytes(config)
    hidden, queries, keys, inner = teacher.widths
    attention = hidden * _FLOAT32 + value * (hidden + 2 * queries + 2 * keys)
    at_head = _logit_bytes(teacher, tokens, chunk_bytes) + tokens * (value * hidden + _SCORE_BYTES * _top_k(config))
    return tokens * value * hidden + max(at_head, tokens * max(attention, value * (hidden + 3 * inner)))


def _logit_bytes(size: ModelSize, tokens: int, chunk_bytes: float) -> float:
    """Bytes of a chunk of the head's logits at the most."""
    vocabulary = (size.outer - size.looked_up) / size.widths[0]
    return _LOGIT_PEAK_BYTES * min(chunk_bytes / _LOGIT_BYTES, tokens * vocabulary)


def _top_k(config: RunConfig) -> int:
    return 0 if config.teacher is None else config.teacher.top_k or 0


def head_chunk_bytes(device_bytes: float) -> float:
    """The most bytes of the head's logits at a time on a GPU with `device_bytes` of memory."""
    return min(_CHUNK_BYTES_MAX, max(_CHUNK_BYTES_MIN, device_bytes * _CHUNK_SHARE))


def fits(config: RunConfig, size: ModelSize, machine: Machine) -> bool:
    """True if state and activations fit the device of each process."""
    return trainer_memory(config, size, machine).of_each(machine.processes) <= machine.device_bytes * USABLE_SHARE


# Whether a configuration of a model's size fits such machines.
Suits = Callable[[RunConfig, ModelSize, Machine], bool]


def state_fits(config: RunConfig, size: ModelSize, machine: Machine) -> bool:
    """True if the state leaves room for activations on the device of each process."""
    state = trainer_memory(config, size, machine).state
    return state <= machine.processes * machine.device_bytes * STATE_SHARE_MAX


def misfit(config: RunConfig, size: ModelSize, sheet: Accelerator, machine: Machine) -> str | None:
    """A sentence if the state alone does not fit the trainer's GPUs, with settings that would fit; else None.

    sheet: of the machine's GPUs, which it names.
    """
    found = trainer_memory(config, size, machine)
    if state_fits(config, size, machine):
        return None
    return (
        f"trainer.nproc_per_node: {machine.processes} processes on {sheet.name} would hold {found.state / 1e9:,.0f} GB "
        f"of {machine.processes * machine.device_bytes / 1e9:,.0f}, {state_in_words(found, size)}; "
        f"allowed: {_ways(config, size, machine, state_fits)}"
    )


def doubted(config: RunConfig, size: ModelSize, sheet: Accelerator, machine: Machine) -> str | None:
    """A sentence if the largest pass hardly fits beside the state, with settings that would fit; else None."""
    if fits(config, size, machine):
        return None
    found = trainer_memory(config, size, machine)
    return (
        f"trainer.micro_batch_tokens_max: a pass of {found.pass_tokens:,} tokens takes about "
        f"{found.activations / 1e9:,.1f} GB beside {found.state / machine.processes / 1e9:,.1f} GB of state, more than "
        f"{sheet.name} ({machine.device_bytes / 1e9:,.0f} GB) has; expected: {_ways(config, size, machine, fits)}"
    )


def state_in_words(found: TrainerMemory, size: ModelSize) -> str:
    """The parts of a state: bytes per parameter of the policy, and the weights of teachers."""
    teachers = f" and {found.teachers / 1e9:,.0f} GB of the section teacher" if found.teachers else ""
    return f"{(found.state - found.teachers) / size.parameters:.3g} bytes per parameter{teachers}"


def _ways(config: RunConfig, size: ModelSize, machine: Machine, suits: Suits) -> str:
    return ", or ".join(ways_to_fit(config, size, machine, suits)) or "a smaller model, or shorter responses"


def ways_to_fit(config: RunConfig, size: ModelSize, machine: Machine, suits: Suits) -> list[str]:
    """Changes that make the configuration suit: single changes, else several together; and more GPUs."""
    steps = list(_savings(config))
    found = [words for words, change in steps if suits(change(config), size, machine)]
    together, changed = list[str](), config
    for words, change in [] if found else steps:
        together.append(words)
        changed = change(changed)
        if suits(changed, size, machine):
            found = [" with ".join(together)]
            break
    fewest = _fewest(config, size, machine, suits)
    if fewest is not None:
        found.append(f"at least {fewest} processes (trainer.nnodes x nproc_per_node)")
    if config.lora is None:
        adapted = replace(config, lora=LoraConfig())
        fewest = _fewest(adapted, size, machine, suits)
        if fewest is not None:
            state = trainer_memory(adapted, size, replace(machine, processes=fewest)).state
            found.append(f"the section lora with at least {fewest}, for {state / 1e9:,.0f} GB")
    if machine.teachers and suits(config, size, replace(machine, teachers=())):
        found.append("a smaller teacher")
    return found


def _fewest(config: RunConfig, size: ModelSize, machine: Machine, suits: Suits) -> int | None:
    counts = range(1, _PROCESSES_MAX + 1)
    return next((n for n in counts if suits(config, size, replace(machine, processes=n))), None)


def _savings(config: RunConfig) -> Iterator[tuple[str, Callable[[RunConfig], RunConfig]]]:
    """Pairs (setting in words, change of a configuration) that save memory and are not in use, the cheapest first."""

    def trainer(**changes: Any) -> Callable[[RunConfig], RunConfig]:
        return lambda given: replace(given, trainer=replace(given.trainer, **changes))

    if not config.trainer.gradient_checkpointing:
        yield "trainer.gradient_checkpointing: true", trainer(gradient_checkpointing=True)
    longest = longest_response(config)
    if pass_tokens(config) > longest:
        yield f"trainer.micro_batch_tokens_max: {longest}", trainer(micro_batch_tokens_max=longest)
    if config.optimizer.name != "adamw_8bit":
        yield "optimizer.name: adamw_8bit", _with_8bit
    if config.trainer.offload == "none":
        yield "trainer.offload: optimizer", trainer(offload="optimizer")


def _with_8bit(config: RunConfig) -> RunConfig:
    return replace(config, optimizer=replace(config.optimizer, name="adamw_8bit"))


def _copy_bytes(config: RunConfig, machine: Machine) -> int:
    """Bytes per trained parameter of a copy in the compute dtype; several processes gather single layers instead."""
    return _HALF if config.trainer.dtype == "bfloat16" and machine.processes == 1 else 0


def _frozen_bytes(config: RunConfig, machine: Machine) -> int:
    """Bytes per parameter of the policy for weights without training: under adapters, or as a reference."""
    frozen = frozen_bytes(config)
    if config.lora is not None:
        is_stored_so = machine.stored_bytes <= frozen
        return frozen if is_stored_so else machine.stored_bytes + _copy_bytes(config, machine)
    return frozen if config.algorithm.needs_reference else 0


def frozen_bytes(config: RunConfig) -> int:
    """Bytes per parameter of a model that is not trained at all: a reference, or a teacher."""
    return _HALF if config.trainer.dtype == "bfloat16" else _FLOAT32
