"""Builds a member's engine: the configured engine, or with "auto" the machine's best, and logs the choice."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Literal

from resources.model_config import ModelConfigError, model_fields, positions_max
from storage.clock import SystemClock
from tasks.configuration.rollout import RolloutConfig
from tasks.configuration.run_config import RunConfig
from tasks.sampling.engines.drafter import Drafter
from tasks.sampling.engines.engine import Engine, EngineError
from tasks.sampling.engines.vllm_names import installed_version

log = logging.getLogger(__name__)


def build_engine(config: RolloutConfig, model_dir: Path, vocab_size: int) -> Engine:
    """Build an engine without weights. Imports torch and vLLM only for an engine that needs them."""
    if config.engine == "scripted":
        from tasks.sampling.engines.scripted_engine import ScriptedEngine  # noqa: PLC0415 - keeps torch out of other paths

        return ScriptedEngine(
            vocab_size=vocab_size,
            max_responses_in_flight=config.max_responses_in_flight,
            clock=SystemClock() if config.scripted_step_s else None,
            step_time_s=lambda _: config.scripted_step_s,
        )
    if config.engine not in ("auto", "torch", "vllm"):
        raise EngineError(f"rollout.engine: {config.engine!r} is not known; allowed: auto, torch, vllm, scripted")
    chosen, reason = best_engine(config) if config.engine == "auto" else (config.engine, "as configured")
    engine = _vllm(config, model_dir, vocab_size) if chosen == "vllm" else _torch(config, model_dir)
    # vLLM would be faster on a GPU than our own engine, so the user is warned.
    level = logging.WARNING if config.engine == "auto" and engine.name.endswith("cuda") else logging.INFO
    log.log(level, "engine %s: %s; %s", config.engine, engine.name, reason)
    return engine


def best_engine(config: RolloutConfig) -> tuple[Literal["torch", "vllm"], str]:
    """The engine that "auto" means on this machine, and the reason: vLLM if it is installed and finds a GPU."""
    version = installed_version()
    if version is None:
        return "torch", "vLLM is not installed"
    if config.device == "cpu":
        return "torch", "rollout.device is cpu"
    from tasks.sampling.engines.vllm_settings import prepare_environment  # noqa: PLC0415 - it imports vLLM: seconds

    device = prepare_environment(config.vllm)
    if device in ("", "cpu"):
        return "torch", f"vLLM {version} finds no GPU here"
    return "vllm", f"vLLM {version} finds a GPU: {device}"


def _torch(config: RolloutConfig, model_dir: Path) -> Engine:
    from tasks.sampling.engines.speculation import Speculation  # noqa: PLC0415
    from tasks.sampling.engines.suffix_drafter import SuffixDrafter  # noqa: PLC0415
    from tasks.sampling.engines.torch_engine import TorchEngine  # noqa: PLC0415

    length, rows, wanted = context_length(config, model_dir), config.max_responses_in_flight, config.speculation
    speculation = None
    if wanted.drafts != 0:
        drafter: Drafter
        if wanted.draft_model is None:
            drafter = SuffixDrafter(rows=rows, context_length=length, siblings=wanted.source == "siblings")
        else:
            from tasks.sampling.engines.model_drafter import model_drafter  # noqa: PLC0415

            drafter = model_drafter(config, Path(wanted.draft_model), context_length=length)
        speculation = Speculation(drafter, wanted.drafts)
    return TorchEngine(
        model_dir,
        dtype=config.dtype,
        device=config.device,
        max_responses_in_flight=rows,
        context_length=length,
        speculation=speculation,
    )


def _vllm(config: RolloutConfig, model_dir: Path, vocab_size: int) -> Engine:
    from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415

    return VllmEngine(
        model_dir,
        vocab_size=vocab_size,
        dtype=config.dtype,
        device=config.device,
        max_responses_in_flight=config.max_responses_in_flight,
        context_length=context_length(config, model_dir),
        config=config.vllm,
        speculation=config.speculation,
    )


def context_length(config: RolloutConfig, model_dir: Path) -> int:
    """The most tokens of prompt + response: the user's limit, or else the model's own from its config.json.

    Raises EngineError when the user's limit exceeds the model's, or when neither is given.
    """
    try:
        own = positions_max(model_fields(model_dir))
    except ModelConfigError as error:
        raise EngineError(str(error)) from None
    asked = config.context_length
    if asked is None and own is None:
        raise EngineError("config.json has no max_position_embeddings; set rollout.context_length")
    if asked is not None and own is not None and asked > own:
        raise EngineError(f"rollout.context_length: {asked} given; allowed: up to the model's own {own}")
    return asked or own or 0


def engine_settings(config: RunConfig) -> RolloutConfig:
    """The section `rollout` for an engine: `vllm.batch_invariant` is true or false.

    "auto" is false where the loss corrects for the sampler anyway, because batch-invariant kernels cost speed, and true
    where nothing corrects, unless drafts undo what such kernels give. A user who wants resumed responses to be
    identical says true.
    """
    rollout = config.rollout
    if rollout.vllm.batch_invariant != "auto":
        return rollout
    wanted = rollout.speculation.keeps_tokens(rollout.dtype) and not config.algorithm.corrects_for_sampler
    return replace(rollout, vllm=replace(rollout.vllm, batch_invariant=wanted))
