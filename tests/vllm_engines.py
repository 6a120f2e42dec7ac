"""VLLM engines for tests: made once, because starting one takes seconds, and given out with nothing in flight."""

from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.sampling.engines.testing import CONTEXT_LENGTH, EngineContract
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.vllm_names import installed_version
from tests.tiny_model import VOCAB_SIZE, tiny_config, tiny_model, weight_blocks

WHY_NOT = "vLLM is not installed: make test-vllm"
MISSING = installed_version() is None


def vllm_tiny_config(model_type: str = "qwen2", **changes: Any) -> Any:
    """The tiny model with heads that vLLM's CPU attention has a kernel for: 32 wide."""
    return tiny_config(model_type, **({"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32} | changes))


class EnginePool:
    """Engines of one model by their number of rows. All live until `close`.

    vLLM in this process has global state, which the first engine that ends takes from all others.
    """

    def __init__(self, model_dir: Path, config: VllmConfig, speculation: SpeculationConfig | None = None) -> None:
        self.model = tiny_model(vllm_tiny_config())
        self._model_dir = model_dir
        self._config = config
        self._speculation = speculation
        self._free: dict[int, list[VllmEngine]] = defaultdict(list)
        self._rows: dict[int, int] = {}
        self._all: list[VllmEngine] = []

    def take(self, rows: int) -> VllmEngine:
        """An engine with weights 0 and nothing in flight."""
        engine = (
            self._free[rows].pop() if self._free[rows] else self.make(self._model_dir, self.model, rows, self._config)
        )
        engine.load_weights(0, weight_blocks(self.model))
        self._rows[id(engine)] = rows
        return engine

    def give_back(self, engine: VllmEngine) -> None:
        engine.abort(range(1000))
        self._free[self._rows.pop(id(engine))].append(engine)

    def make(self, model_dir: Path, model: Any, rows: int, config: VllmConfig, *, keyed: bool = True) -> VllmEngine:
        """Another engine, with the model's weights."""
        model.config.save_pretrained(model_dir)
        engine = VllmEngine(
            model_dir,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            max_responses_in_flight=rows,
            context_length=CONTEXT_LENGTH,
            config=config,
            speculation=self._speculation,
            keyed=keyed,
        )
        self._all.append(engine)
        engine.load_weights(0, weight_blocks(model))
        return engine

    def close(self) -> None:
        for engine in self._all:
            engine.close()


class VllmContract(EngineContract):
    """The contract of every engine, for the engines of the pool that the fixture `pool_name` is."""

    prefill_block = 32
    pool_name = "pool"
    pool: EnginePool

    @pytest.fixture
    def engine_factory(self, request: pytest.FixtureRequest) -> Any:
        self.pool = request.getfixturevalue(self.pool_name)
        return self.pool.take

    def release(self, engine: VllmEngine) -> None:
        self.pool.give_back(engine)

    def weights(self, version: int) -> Any:
        return weight_blocks(tiny_model(vllm_tiny_config(), seed=version))
