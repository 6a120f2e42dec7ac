"""What drafts cost and give on a device: steps by the tokens fed, tokens per second, and whether tokens stay the same.

A step with 1, 3, 5 or 9 tokens per response shows what verifying costs, by a drafter of the torch engine that is always
wrong. Speeds are of new text, in which a random model hardly repeats itself, so drafts are a cost; and of the same
prompts and noise again, where siblings hold every token: the most that drafts can give. The draft model is the lower
layers of the random policy, so it costs what such a model costs, and is seldom right: `accepted` tells how often.
"""

import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from benchmarks.gpu.model import model_config, peaked_model
from benchmarks.gpu.sizes import SHAPES, ModelShape, Size
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import DRAFTS_MAX, RolloutConfig, SpeculationConfig, VllmConfig
from tasks.sampling.engines.drafter import WIDTHS, Drafter
from tasks.sampling.engines.engine import Engine, EngineError, GenerationRequest
from tasks.sampling.engines.model_drafter import model_drafter
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_names import installed_version
from tasks.sampling.engines.weight_tensors import as_torch

Source = Literal["none", "ngram", "siblings", "draft_model"]
SOURCES: tuple[Source, ...] = ("none", "siblings", "ngram", "draft_model")
GROUP_SIZE = 8
_PROMPT_TOKENS = 40
_STEP_PROMPT_TOKENS, _UNTIMED = 8, 2
_MEMORY_SHARE = 0.4
_DRAFT_LAYERS = 0.25
# Those of 2 tokens are of little use beside those of 1 and 3.
_WIDTHS = tuple(width for width in WIDTHS if width != 2)


def measure(size: Size, engines: Sequence[str] = ()) -> Iterator[dict[str, Any]]:
    """Yield the figures each time that there is another: steps of all models, then speeds of the first one.

    engines: "torch" and "vllm"; () means all that are installed.
    """
    names = engines or ("torch", *(["vllm"] if installed_version() is not None else []))
    found: dict[str, Any] = {"steps": [], "rates": [], "skipped": {}}
    for model in size.engine_models:
        with _model(size, SHAPES.get(model, size.shape)) as (folder, blocks):
            for rows in _steps(size, folder, blocks):
                found["steps"] += [{"model": model, **row} for row in rows]
                yield found
    model = size.engine_models[0]
    shape = SHAPES.get(model, size.shape)
    with _model(size, shape) as (folder, blocks):
        _write_draft_model(shape, blocks, _of_drafts(folder))
        for name in names:
            for rows in _rates(size, name, shape, folder, blocks, found["skipped"]):
                found["rates"] += [{"model": model, "engine": name, **row} for row in rows]
                yield found


@contextmanager
def _model(size: Size, shape: ModelShape) -> Iterator[tuple[Path, Mapping[str, TensorBlock]]]:
    """A folder with the model's configuration, and its random weights."""
    with tempfile.TemporaryDirectory() as folder:
        blocks = peaked_model(shape, Path(folder), size.device)
        if size.device == "cuda":
            torch.cuda.empty_cache()  # for vLLM's process
        yield Path(folder), blocks


def _of_drafts(folder: Path) -> Path:
    return folder / "draft"


def _write_draft_model(shape: ModelShape, blocks: Mapping[str, TensorBlock], folder: Path) -> None:
    """A model of the policy's lower layers."""
    layers = max(1, round(_DRAFT_LAYERS * shape.layers))
    above = tuple(f"model.layers.{layer}." for layer in range(layers, shape.layers))
    model_config(replace(shape, layers=layers)).save_pretrained(str(folder))
    kept = {name: as_torch(block) for name, block in blocks.items() if not name.startswith(above)}
    save_file(kept, folder / "model.safetensors")


class WrongDrafts:
    """A `Drafter` whose drafts are wrong but by accident. each: the drafts of a response in a step."""

    def __init__(self, vocab_size: int) -> None:
        self.each = 0
        self._vocab_size = vocab_size
        self._asked = 0

    def start(self, requests: Sequence[GenerationRequest], tokens: Sequence[Sequence[int]]) -> None: ...

    def draft(self, responses: Sequence[int], most: int) -> list[Sequence[int]]:
        self._asked += 1
        count = min(self.each, most)
        return [[(7919 * (self._asked + n)) % self._vocab_size for n in range(count)] for _ in responses]

    def leave(self, responses: Sequence[int]) -> None: ...


def _steps(size: Size, folder: Path, blocks: Mapping[str, TensorBlock]) -> Iterator[list[dict[str, Any]]]:
    """By responses and tokens per response, milliseconds of a step of the torch engine, few responses first."""
    drafter = WrongDrafts(1000)
    # A wrong draft is right by accident now and then, so a response may need less than its room.
    room = 2 * len(_WIDTHS) * (_UNTIMED + size.speculation_steps) + DRAFTS_MAX
    sampling = SamplingParams(max_completion_length=room)
    engine = _torch(size, folder, max(size.speculation_batches), _STEP_PROMPT_TOKENS + room, drafter)
    with closing(engine):
        engine.load_weights(0, blocks)
        for responses in size.speculation_batches:
            engine.start(_requests(responses, _STEP_PROMPT_TOKENS, 0, sampling))
            rows = []
            for width in _WIDTHS:
                drafter.each = width - 1
                for _ in range(_UNTIMED):
                    engine.step()
                began_s, tokens = time.perf_counter(), 0
                for _ in range(size.speculation_steps):
                    tokens += sum(len(delta.token_ids) for delta in engine.step())
                seconds = (time.perf_counter() - began_s) / size.speculation_steps
                drawn = tokens / size.speculation_steps / responses
                rows.append({"responses": responses, "fed": width, "ms": 1e3 * seconds, "tokens_drawn": drawn})
            engine.abort(range(responses))
            yield [{**row, "over_1": row["ms"] / rows[0]["ms"]} for row in rows]


def _rates(
    size: Size, name: str, shape: ModelShape, folder: Path, blocks: Mapping[str, TensorBlock], skipped: dict[str, str]
) -> Iterator[list[dict[str, Any]]]:
    """By source and text, tokens per second, and the share of responses as without drafts."""
    plain: dict[str, dict[int, list[int]]] = {}
    for source in SOURCES:
        try:
            engine = _engine(size, name, shape, folder, source)
        except EngineError as error:
            # Such as a vLLM that takes its model runner V1.
            skipped[f"{name}, {source}"] = str(error)
            continue
        with closing(engine):
            engine.load_weights(0, blocks)
            _decoded(engine, size, iteration=1)  # kernels are compiled and graphs recorded
            rows = []
            for text in ("new", "repeated"):
                # Other responses with equal noise: a response that comes back would know itself.
                first = size.speculation_responses if text == "repeated" else 0
                before = engine.draft_totals
                answers, seconds = _decoded(engine, size, iteration=2, first=first)
                wanted = plain.setdefault(text, answers)
                drafts = None if before is None else engine.draft_totals.since(before)
                rows.append(
                    {
                        "source": source,
                        "text": text,
                        "responses": len(answers),
                        "tokens_per_s": sum(map(len, answers.values())) / seconds,
                        "accepted": None if drafts is None else drafts.accepted / max(1, drafts.drafted),
                        "identical": sum(answers[r] == wanted[r] for r in wanted) / len(wanted),
                    }
                )
        yield rows


def _decoded(engine: Engine, size: Size, iteration: int, first: int = 0) -> tuple[dict[int, list[int]], float]:
    """The tokens of each response, numbered from `first`, all decoded together, and the seconds."""
    sampling = SamplingParams(max_completion_length=size.speculation_tokens)
    asked = _requests(size.speculation_responses, _PROMPT_TOKENS, iteration, sampling)
    answers: dict[int, list[int]] = {request.response: [] for request in asked}
    began_s = time.perf_counter()
    engine.start([replace(request, response=first + request.response) for request in asked])
    while deltas := engine.step():
        for delta in deltas:
            answers[delta.response - first] += delta.token_ids
    return answers, time.perf_counter() - began_s


def _requests(count: int, prompt_tokens: int, iteration: int, sampling: SamplingParams) -> list[GenerationRequest]:
    """Groups of GROUP_SIZE responses; every iteration has prompts and noise of its own."""

    def prompt(group: int) -> tuple[int, ...]:
        return tuple(3 + (7 * iteration + 31 * group + 11 * place * place) % 997 for place in range(prompt_tokens))

    return [
        GenerationRequest(r, r // GROUP_SIZE, prompt(r // GROUP_SIZE), (), noise_key(5, iteration, r), sampling)
        for r in range(count)
    ]


def _torch(size: Size, folder: Path, rows: int, context_length: int, drafter: Drafter | None) -> TorchEngine:
    return TorchEngine(
        folder,
        dtype=_dtype(size),
        device="cuda" if size.device == "cuda" else "cpu",
        max_responses_in_flight=rows,
        context_length=context_length,
        speculation=None if drafter is None else Speculation(drafter, DRAFTS_MAX),
    )


def _engine(size: Size, name: str, shape: ModelShape, folder: Path, source: Source) -> Any:
    rows, context_length = size.speculation_responses, _PROMPT_TOKENS + size.speculation_tokens
    if name == "torch":
        return _torch(size, folder, rows, context_length, _drafter(size, folder, source, rows, context_length))
    from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415 - it reads the environment on import

    speculation = SpeculationConfig()
    if source != "none":
        draft_model = str(_of_drafts(folder)) if source == "draft_model" else None
        speculation = SpeculationConfig(drafts=DRAFTS_MAX, source=source, draft_model=draft_model)
    settings = VllmConfig(gpu_memory_utilization=_MEMORY_SHARE, process="own" if size.device == "cuda" else "same")
    return VllmEngine(
        folder,
        vocab_size=shape.vocab_size,
        dtype=_dtype(size),
        max_responses_in_flight=rows,
        context_length=context_length,
        config=settings,
        speculation=speculation,
    )


def _drafter(size: Size, folder: Path, source: Source, rows: int, context_length: int) -> Drafter | None:
    if source == "none":
        return None
    if source != "draft_model":
        return SuffixDrafter(rows=rows, context_length=context_length, siblings=source == "siblings")
    device: Literal["cuda", "cpu"] = "cuda" if size.device == "cuda" else "cpu"
    config = RolloutConfig(engine="torch", dtype=_dtype(size), device=device, max_responses_in_flight=rows)
    return model_drafter(config, _of_drafts(folder), context_length=context_length)


def _dtype(size: Size) -> Literal["bfloat16", "float32"]:
    return "bfloat16" if size.device == "cuda" else "float32"
