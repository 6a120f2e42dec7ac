"""Whether a response that is interrupted and resumed on a device gets the tokens that it would have had.

Each engine decodes the same responses one at a time and in batches, undisturbed and with every response cut at random
tokens and resumed among others. vLLM runs with its batch-invariant kernels. Heads are of two widths, because attention
has other kernels for each.
"""

import random
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

from benchmarks.gpu.model import peaked_model
from benchmarks.gpu.sizes import ModelShape, Size
from benchmarks.parity_work import Answer, Decoding, compare, random_cuts
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_names import installed_version

GROUP_SIZE = 8
_PROMPT_TOKENS = 40
_MEMORY_SHARE = 0.4


def measure(size: Size, engines: Sequence[str] = ()) -> dict[str, Any]:
    """By engine, head width and batch: the share of resumed responses that are identical, and of other batches'.

    engines: "torch" and "vllm"; () means all that are installed.
    """
    names = engines or ("torch", *(["vllm"] if installed_version() is not None else []))
    return {"arms": [arm for width in size.head_widths for arm in _of_width(size, width, names)]}


def _of_width(size: Size, width: int, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    shape = size.identity_shape(width)
    with tempfile.TemporaryDirectory() as folder:
        blocks = peaked_model(shape, Path(folder), size.device)
        for name in names:
            with _engine(name, size, shape, Path(folder)) as engine:
                engine.load_weights(0, blocks)
                yield from _arms(size, name, width, engine)


def _arms(size: Size, name: str, width: int, engine: Engine) -> Iterator[dict[str, Any]]:
    alone: Mapping[int, Answer] | None = None
    for batch in size.identity_batches:
        requests = _requests(size, max(batch, GROUP_SIZE))
        whole = _decoded(engine, requests, batch, None)
        interrupted = _decoded(engine, requests, batch, random_cuts(whole, random.Random(3)))
        resumed = compare(interrupted, whole)
        alone = whole if alone is None else alone
        shared = {response: whole[response] for response in alone if response in whole}
        yield {
            "engine": engine.name,
            "kind": name,
            "head_width": width,
            "batch": batch,
            "responses": len(whole),
            "tokens": sum(len(answer.token_ids) for answer in whole.values()),
            "resumed_identical": resumed.identical,
            "logprob_difference_max": resumed.logprob_difference_max,
            "as_in_smallest_batch": compare(shared, {response: alone[response] for response in shared}).identical,
        }


def _decoded(
    engine: Engine, requests: list[GenerationRequest], batch: int, cuts: Mapping[int, list[int]] | None
) -> dict[int, Answer]:
    """The answers, `batch` responses at a time."""
    answers: dict[int, Answer] = {}
    for start in range(0, len(requests), batch):
        decoding = Decoding(requests[start : start + batch], cuts, random.Random(2) if cuts else None)
        decoding.run(engine)
        answers |= decoding.answers
    return answers


def _requests(size: Size, count: int) -> list[GenerationRequest]:
    rng = random.Random(0)
    sampling = SamplingParams(max_completion_length=size.identity_tokens)
    prompts = [tuple(rng.randrange(3, 1000) for _ in range(_PROMPT_TOKENS)) for _ in range(count // GROUP_SIZE)]
    return [
        GenerationRequest(
            index, index // GROUP_SIZE, prompts[index // GROUP_SIZE], (), noise_key(5, 0, index), sampling
        )
        for index in range(count)
    ]


@contextmanager
def _engine(name: str, size: Size, shape: ModelShape, folder: Path) -> Iterator[Engine]:
    dtype: Literal["float32", "bfloat16"] = "bfloat16" if size.device == "cuda" else "float32"
    rows, context = max(size.identity_batches), _PROMPT_TOKENS + size.identity_tokens
    engine: Any
    if name == "torch":
        engine = TorchEngine(
            folder,
            dtype=dtype,
            device="cuda" if size.device == "cuda" else "cpu",
            max_responses_in_flight=rows,
            context_length=context,
        )
    else:
        from tasks.sampling.engines.vllm_engine import VllmEngine  # noqa: PLC0415 - it reads the environment on import

        settings = VllmConfig(
            batch_invariant=True,
            gpu_memory_utilization=_MEMORY_SHARE,
            process="own" if size.device == "cuda" else "same",
        )
        engine = VllmEngine(
            folder,
            vocab_size=shape.vocab_size,
            dtype=dtype,
            max_responses_in_flight=rows,
            context_length=context,
            config=settings,
        )
    with closing(engine):
        yield engine
