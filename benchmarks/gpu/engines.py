"""Decode speed of our engines against bare vLLM on one device, the price of batch invariance, and what ours cost.

Every engine has a process of its own (`engine_arm`). All of them start beside each other and then take turns; one that
does not start, hangs or breaks down costs itself alone.
"""

import importlib.util
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.arm import Arm, ArmError, start_phases
from benchmarks.gpu.engine_arm import PROMPT_TOKENS, EngineWork, Kind
from benchmarks.gpu.model import write_model
from benchmarks.gpu.sizes import SHAPES, ModelShape, Size

_CPU_CACHE_BYTES = 64 << 20
_WORKING_BYTES = 6 << 30
_BLOCK_TOKENS = 128  # at least those of a block of any attention backend
_STEP_LIMIT_S = 60.0
# What has not started after these seconds starts beside the measurements of the others, and is measured last.
_LATE_S = {"cuda": 110.0, "cpu": 240.0}
_LAST_S = 60.0


def measure(size: Size) -> Iterator[dict[str, Any]]:
    """Tokens per second by model, responses and engine, and each start by its phases; yields with each figure."""
    yield from _measured(size, {name: _kinds(size, name) for name in size.engine_models}, size.engine_batches)


def measure_taxes(size: Size) -> Iterator[dict[str, Any]]:
    """Tokens per second with our noise and with vLLM's own, and the cost of a journal over the bare loop."""
    kinds: dict[str, list[Kind]] = {size.engine_models[0]: ["ours", "unkeyed"]}
    yield from _measured(size, kinds, (size.responses,), journal=True)


def _kinds(size: Size, model: str) -> list[Kind]:
    """The engines that run a model; batch invariance and our own engine are tried with the first one."""
    return ["bare", "ours", "torch", "invariant"] if model == size.engine_models[0] else ["bare", "ours"]


def _measured(
    size: Size, models: dict[str, list[Kind]], batches: Sequence[int], *, journal: bool = False
) -> Iterator[dict[str, Any]]:
    found: dict[str, Any] = {"tokens": size.tokens, "engines": 0, "starts": [], "rates": [], "skipped": {}}
    with ExitStack() as closing:
        crew = _Crew(size, found)
        closing.callback(crew.close)
        for model, kinds in models.items():
            folder = Path(closing.enter_context(tempfile.TemporaryDirectory()))
            crew.start(model, kinds, folder)
        yield from crew.await_starts(_LATE_S[size.device])
        yield from crew.measure(batches)
        if crew.late:
            yield from crew.await_starts(_LAST_S)
            yield from crew.measure(batches)
        for model in models if journal else ():
            found |= crew.journalled(model)
            yield found
    if not found["rates"]:
        raise RuntimeError(f"no engine could be measured: {found['skipped']}")


class _Crew:
    """The engines of a measurement; what they answer goes to `found`. late: those that have not started yet."""

    def __init__(self, size: Size, found: dict[str, Any]) -> None:
        self._size, self._found = size, found
        self._arms: dict[tuple[str, Kind], Arm] = {}
        self._ready: set[tuple[str, Kind]] = set()
        self._measured: set[tuple[str, Kind]] = set()

    @property
    def late(self) -> list[tuple[str, Kind]]:
        return [each for each in self._arms if each not in self._ready]

    def start(self, model: str, kinds: Sequence[Kind], folder: Path) -> None:
        """Write the model, and start its engines without waiting for them."""
        shape = self._size.shape if self._size.small else SHAPES[model]
        write_model(shape, folder, self._size.device)
        for kind in kinds:
            if kind != "torch" and importlib.util.find_spec("vllm") is None:
                self._found["skipped"][f"{model} {kind}"] = "vllm is not installed"
            elif kind == "invariant" and self._size.device != "cuda":
                self._found["skipped"][f"{model} {kind}"] = "vLLM has batch-invariant kernels for GPUs only"
            else:
                work = engine_work(self._size, shape, kind, folder)
                self._found["engines"] += 1
                self._arms[model, kind] = Arm("benchmarks.gpu.engine_arm", work.as_argument())

    def await_starts(self, limit_s: float) -> Iterator[dict[str, Any]]:
        """Wait for the engines that have not started; those that have not after `limit_s` seconds stay late."""
        end_s = time.monotonic() + limit_s
        for each in self.late:
            arm = self._arms[each]
            try:
                answer = arm.answer(end_s - time.monotonic())
            except ArmError as error:
                self._found["skipped"][" ".join(each)] = f"its start was {error}"
                if arm.has_ended:
                    del self._arms[each]
                continue
            self._found["skipped"].pop(" ".join(each), None)
            self._ready.add(each)
            phases = {} if each[1] == "torch" else start_phases(arm.log)
            self._found["starts"].append({"model": each[0], "engine": each[1], "phases": phases, **answer})
            yield self._found

    def measure(self, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Let the engines of each model that have started take turns, once for every number of responses."""
        for model in dict.fromkeys(model for model, _ in self._arms):
            new = [each for each in self._arms if each in self._ready - self._measured and each[0] == model]
            for responses in batches if new else ():
                for each, rates in self._rates(new, responses).items():
                    self._found["rates"].append(
                        {
                            "model": model,
                            "engine": each[1],
                            "responses": responses,
                            "tokens_per_s": statistics.median(rates),
                            "rounds": rates,
                        }
                    )
                yield self._found
            self._measured |= set(new)

    def _rates(self, those: list[tuple[str, Kind]], responses: int) -> dict[tuple[str, Kind], list[float]]:
        asked = {"responses": responses, "tokens": self._size.tokens}
        rates: dict[tuple[str, Kind], list[float]] = {}
        for turn in range(1 + self._size.engine_rounds):  # the first one does not count
            for each in [one for one in those[turn % len(those) :] + those[: turn % len(those)] if one in self._arms]:
                try:
                    rate = self._arms[each].ask(asked, _STEP_LIMIT_S)["tokens_per_s"]
                except ArmError as error:
                    self._found["skipped"][" ".join(each)] = str(error)
                    self._arms.pop(each).close()
                    rates.pop(each, None)
                    continue
                if turn:
                    rates.setdefault(each, []).append(rate)
        return rates

    def journalled(self, model: str) -> dict[str, Any]:
        """What a journal costs our engine; empty if it has broken down."""
        arm = self._arms.get((model, "ours"))
        return {} if arm is None else arm.ask({"journal": True}, 3 * _STEP_LIMIT_S)

    def close(self) -> None:
        for arm in self._arms.values():
            arm.end()
        for arm in self._arms.values():
            arm.close()


def engine_work(size: Size, shape: ModelShape, kind: Kind, folder: Path) -> EngineWork:
    """The work of an engine's process; the same sizes always give vLLM the same settings, for its compiled code."""
    context_length = PROMPT_TOKENS + max(size.tokens, *size.journal_tokens)
    cache_bytes, share = _CPU_CACHE_BYTES, 0.9
    if size.device == "cuda":
        blocks = size.responses * (context_length // _BLOCK_TOKENS + 2)
        per_token = 2 * 2 * shape.layers * shape.key_value_heads * shape.head_width
        cache_bytes = blocks * _BLOCK_TOKENS * per_token
        needed = 2 * shape.weights + cache_bytes + _WORKING_BYTES
        share = round(min(0.9, needed / torch.cuda.get_device_properties(0).total_memory), 3)
    return EngineWork(
        kind=kind,
        folder=str(folder),
        shape=shape,
        device=size.device,
        small=size.small,
        responses=size.responses,
        context_length=context_length,
        memory_share=share,
        cache_bytes=cache_bytes,
        caches=size.caches,
    )
