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
            context_length=config.context_length or context_length(model_dir),
        )
        log.info("engine %s: %s", config.engine, engine.name)
        return engine
    raise EngineError(f"rollout.engine: {config.engine!r} is not known; allowed: auto, torch, scripted")


def context_length(model_dir: Path) -> int:
    """The model's own limit on prompt + response, from its config.json."""
    model = json.loads((model_dir / "config.json").read_text(encoding="utf-8"))
    length = model.get("max_position_embeddings") or model.get("text_config", {}).get("max_position_embeddings")
    if not isinstance(length, int):
        raise EngineError("config.json has no max_position_embeddings; set rollout.context_length")
    return length
