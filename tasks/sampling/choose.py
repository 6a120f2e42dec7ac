"""Which engine a member runs: what the configuration names, or the best that this machine has; and it says which."""

import json
import logging
from pathlib import Path

from tasks.sampling.config import RolloutConfig
from tasks.sampling.engine import Engine, EngineError

log = logging.getLogger(__name__)


def build_engine(config: RolloutConfig, model_dir: Path, vocab_size: int) -> Engine:
    """An engine without weights. Imports torch only for an engine that needs it."""
    if config.engine == "scripted":
        from tasks.sampling.scripted_engine import ScriptedEngine  # noqa: PLC0415 - keeps torch out of other paths

        return ScriptedEngine(vocab_size=vocab_size, max_responses_in_flight=config.max_responses_in_flight)
    if config.engine in ("auto", "torch"):
        from tasks.sampling.torch_engine import TorchEngine  # noqa: PLC0415

        engine = TorchEngine(
            model_dir,
            dtype=config.dtype,
            device=config.device,
            max_responses_in_flight=config.max_responses_in_flight,
            context_length=context_length(config, model_dir),
        )
        log.info("engine %s: %s", config.engine, engine.name)
        return engine
    raise EngineError(f"rollout.engine: {config.engine!r} is not known; allowed: auto, torch, scripted")


def context_length(config: RolloutConfig, model_dir: Path) -> int:
    """Most tokens of prompt + response: the user's limit, or the model's own from its config.json.

    Raises EngineError when the user asks for more than the model has, or neither says anything.
    """
    model = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    own = model.get("max_position_embeddings") or model.get("text_config", {}).get("max_position_embeddings")
    asked = config.context_length
    if asked is None and not isinstance(own, int):
        raise EngineError("config.json has no max_position_embeddings; set rollout.context_length")
    if asked is not None and isinstance(own, int) and asked > own:
        raise EngineError(f"rollout.context_length: {asked} given; allowed: up to the model's own {own}")
    return int(own if asked is None else asked)
