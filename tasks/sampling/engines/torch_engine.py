"""TorchEngine: continuous batching of any Hugging Face causal language model in plain PyTorch, on a CPU or one GPU.

Every response in flight has a row of a key-value cache allocated in advance. `start` computes the cache of all known
tokens but the last, each prompt once for its whole group, and nothing that a row still holds; every `step` feeds the
last token of every response and samples the next. An interruption therefore changes nothing in the computation of a
response. With a drafter, a step also feeds drafts behind the last token, and keeps our draws while the drafts equal
them. On a GPU in half precision `kernels.py` adds flash attention and recorded steps.
"""

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from storage.records.draft_totals import DraftTotals
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.admission import check_idle, check_requests, check_sizes, finish_reason
from tasks.sampling.engines.batch import Batch, batch_of
from tasks.sampling.engines.decoder import Decoder, build_decoder, matched_weights, read_config, torch_weights
from tasks.sampling.engines.engine import EngineDied, EngineError, GenerationRequest, TokenDelta
from tasks.sampling.engines.kernels import Kernels, kernels_for
from tasks.sampling.engines.keyed_noise import sample
from tasks.sampling.engines.kv_cache import KeyValueCache
from tasks.sampling.engines.packed_cache import PackedCache
from tasks.sampling.engines.prefill_passes import Piece
from tasks.sampling.engines.slot_table import Placement, Slot, SlotTable
from tasks.sampling.engines.speculation import Speculation, verified
from tasks.sampling.engines.step_graphs import StepGraphs
from tasks.sampling.engines.window import TokenCache

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Messages of breakdowns for which PyTorch has no exception class: a failing device, or no memory on the host.
_BREAKDOWN = re.compile(r"CUDA error|CUDA driver error|CUBLAS_STATUS|cuDNN error|DefaultCPUAllocator")


@contextmanager
def _breakdowns() -> Iterator[None]:
    """Turn errors that no request causes (no memory, a failing device) into EngineDied, also if a decoder wraps one."""
    try:
        yield
    except Exception as error:
        reason = _reason(error)
        if reason is None:
            raise
        raise EngineDied(reason) from error


def _reason(error: Exception) -> str | None:
    """Why the engine is dead, in one line; None if the error is no breakdown.

    A frame through which the error passes must not name the error's cause, or both keep the frames' tensors alive, the
    old cache among them, until Python's collector comes by.
    """
    cause = error.__cause__ if isinstance(error, EngineError) else error
    known = isinstance(cause, (torch.OutOfMemoryError, torch.AcceleratorError, MemoryError))
    if not known and not (isinstance(cause, RuntimeError) and _BREAKDOWN.search(str(cause))):
        return None
    first_line = str(cause).partition("\n")[0]
    return f"{type(cause).__name__}: {first_line}"


class TorchEngine:
    """An `Engine`; `load_weights` takes weights by the names and shapes of the model's Hugging Face class."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        dtype: Literal["float32", "bfloat16", "float16"] = "float32",
        device: Literal["auto", "cpu", "cuda"] = "auto",
        max_responses_in_flight: int,
        context_length: int,
        kernels: Kernels | None = None,
        speculation: Speculation | None = None,
    ) -> None:
        """Read `config.json` of `model_dir` and build the decoder; weights and cache are allocated later.

        Args:
            model_dir: folder with a Hugging Face config.json; weights in it are not read.
            dtype: the dtype of weights, activations and cache.
            device: "auto" takes CUDA if there is a CUDA device.
            max_responses_in_flight: the number of rows of the cache.
            context_length: the most tokens of prompt + response.
            kernels: what a step uses beside PyTorch's plain operations; None takes what device, dtype and model allow.
            speculation: what drafts tokens, which changes no token; None: every step samples one per response.

        Raises:
            EngineError: the model cannot be served, or a value is out of range.
        """
        check_sizes(dtype, max_responses_in_flight, context_length)
        self._device = _device(device)
        self._dtype = _DTYPES[dtype]
        self._context_length = context_length
        self._max_in_flight = max_responses_in_flight
        config = read_config(model_dir, context_length)
        self._build: Callable[[], Decoder] = partial(
            build_decoder, config, dtype=self._dtype, device=self._device, context_length=context_length
        )
        self._decoder: Decoder | None = None
        self._vocab_size: int = config.get_text_config().vocab_size
        self._table = SlotTable(max_responses_in_flight)
        self._kernels = kernels
        self._speculation = speculation
        self._cache: TokenCache | None = None
        self._graphs: StepGraphs | None = None
        self._batch: Batch | None = None
        self._version: int | None = None
        self._prefill_tokens = 0
        self._name = f"torch {dtype} {self._device.type}"
        with _breakdowns():
            self._decoder = self._build()

    @property
    def name(self) -> str:
        return self._name

    @property
    def batch_invariant(self) -> bool:
        """True in float32 on a CPU: sums differ in the last bits only, far below the gaps between keyed scores."""
        return self._dtype == torch.float32 and self._device.type == "cpu"

    @property
    def max_responses_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def prefill_tokens(self) -> int:
        """Prompt and prefix tokens computed so far, less each response's last token, which the first step feeds."""
        return self._prefill_tokens

    @property
    def draft_totals(self) -> DraftTotals | None:
        return None if self._speculation is None else self._speculation.totals

    @property
    def weight_version(self) -> int | None:
        return self._version

    @property
    def patch_base(self) -> None:
        """None: all weights are taken."""
        return

    @_breakdowns()
    @torch.inference_mode()
    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        """See `Engine`. A tied parameter may be given by one name or several; the engine converts dtypes to its own.

        On a CPU, tensors of this dtype that are mapped from a weight cache are used where they lie.
        """
        check_idle(version, self._table.responses)
        self._version = None
        given = torch_weights(version, tensors)
        if self._decoder is None:
            self._decoder = self._build()
        # What is mapped from a file never changes; other memory is its owner's, who may train on.
        lasting = {id(tensor) for name, tensor in given.items() if tensors[name].place is not None}
        self._decoder.load(matched_weights(self._decoder.module, given).to_module(given), lasting)
        self._table.forget()
        if self._cache is None:
            self._cache = self._new_cache(self._decoder)
        self._version = version

    @_breakdowns()
    @torch.inference_mode()
    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """See `Engine`. If the computation fails, none of the requests is in flight."""
        decoder, cache = self._loaded()
        check_requests(
            requests,
            self._table.responses,
            max_responses_in_flight=self._max_in_flight,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
        )
        self._batch = None
        placements = self._table.place(requests)
        try:
            self._fill(decoder, cache, placements)
            if self._speculation is not None:
                self._speculation.start([placement.slot for placement in placements])
        except BaseException:
            for placement in placements:
                self._table.leave(placement.row)
            self._table.forget()
            raise

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Remembers` in drafter.py. Without drafts nothing is taken in."""
        if self._speculation is not None:
            self._speculation.remember(prompt_ids, responses)

    @_breakdowns()
    @torch.inference_mode()
    def step(self) -> list[TokenDelta]:
        """See `Engine`. It waits for the device once, to read the sampled tokens and their log-probs."""
        decoder, cache = self._loaded()
        if self._batch is None:
            self._settle(cache)
        live = [slot for slot in self._table.slots if slot is not None]
        batch = self._batch
        if batch is None or not live:
            return []
        drafts = self._drafts(live)
        width = 1 + len(drafts[0])
        if width > 1:
            batch.draft(drafts)
        reach = max(slot.cached for slot in live) + width
        launch = partial(self._launch, decoder, cache, batch, reach, width)
        if self._graphs is None:
            found = launch()
        else:
            cache.reserve(reach)
            found = self._graphs.run(batch, cache.capacity, launch, width)
        tokens, scores = found.tolist()
        deltas = []
        for row, slot in enumerate(live):
            if width == 1:
                deltas.append(self._append(row, slot, int(tokens[row]), scores[row]))
            else:
                of_row = slice(row * width, (row + 1) * width)
                drawn = zip(map(int, tokens[of_row]), scores[of_row], strict=True)
                # In the cache, tokens behind a wrong draft are overwritten unread.
                deltas.append(verified(drafts[row], drawn, partial(self._append, row, slot)))
        if self._speculation is not None:
            self._speculation.settle(deltas)
        return deltas

    def _launch(self, decoder: Decoder, cache: TokenCache, batch: Batch, reach: int, width: int) -> Tensor:
        """A step on the device: what is drawn after each fed token, float64 [2, n * width]; it does not wait."""
        fed = batch.spread(width)
        logits = decoder.logits(fed.token_ids.view(-1, width), cache.step_window(batch.cached, reach, width))
        token_ids, logprobs = self._draw(logits, fed)
        batch.advance(token_ids)
        # One transfer for both: float64 holds token ids and float32 log-probs exactly.
        return torch.stack((token_ids.double(), logprobs.double()))

    def abort(self, responses: Sequence[int]) -> None:
        rows = self._table.responses
        for response in responses:
            if response in rows:
                self._table.leave(rows[response])
                self._batch = None
                if self._speculation is not None:
                    self._speculation.leave([response])

    @_breakdowns()
    def restart(self) -> None:
        """See `Engine`. EngineDied when the device fails again: some errors make it unusable until the process ends."""
        self._forget()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()
        if self._speculation is not None:
            self._speculation.restart()
        torch.zeros(1, device=self._device).add_(1).item()

    def close(self) -> None:
        """Drop the cache, the weights and the drafter; the engine cannot be used afterwards."""
        self._forget()
        self._speculation = None
        if self._device.type == "cuda":
            with suppress(RuntimeError):  # after a breakdown every call raises, and there is no memory to free
                torch.cuda.empty_cache()

    def _forget(self) -> None:
        """Drop everything that takes memory; counters and what a drafter has seen stay."""
        if self._speculation is not None:
            self._speculation.leave(list(self._table.responses))
        self._decoder = self._cache = self._graphs = self._batch = self._version = None
        self._table = SlotTable(self._max_in_flight)

    def _draw(self, logits: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Token ids int64 [n] and log-probs float32 [n]; a benchmark replaces this method."""
        return sample(
            logits,
            batch.keys,
            batch.positions,
            batch.temperature,
            batch.top_p,
            batch.top_k,
            truncated=batch.truncated,
            greedy=batch.greedy,
        )

    def _new_cache(self, decoder: Decoder) -> TokenCache:
        kernels = (
            kernels_for(decoder.packed_heads, self._dtype, self._device) if self._kernels is None else self._kernels
        )
        sizes: dict[str, Any] = {
            "rows": self._max_in_flight,
            "context_length": self._context_length,
            "dtype": self._dtype,
            "device": self._device,
        }
        if kernels.attention is None or decoder.packed_heads is None:
            return KeyValueCache(**sizes)
        if kernels.record is not None:
            self._graphs = StepGraphs(self._max_in_flight, kernels.record)
        return PackedCache(attention=kernels.attention, ahead=DRAFTS_MAX if self._speculation else 0, **sizes)

    def _loaded(self) -> tuple[Decoder, TokenCache]:
        if self._decoder is None or self._cache is None:
            raise EngineError("no weights are loaded; call load_weights first")
        return self._decoder, self._cache

    def _settle(self, cache: TokenCache) -> None:
        """Close gaps between rows and rebuild the batch's tensors, after responses have come or gone."""
        moves = self._table.compact()
        live = [slot for slot in self._table.slots if slot is not None]
        if moves:
            sources, targets = zip(*moves, strict=True)
            cache.copy_rows(sources, targets, max(map(self._table.held, targets)))
        if not live:
            self._batch = None
        elif self._graphs is None:
            self._batch = batch_of(live, self._device)
        else:
            self._batch = self._graphs.placed(batch_of(live, self._device, self._graphs.size(len(live))))

    def _drafts(self, live: Sequence[Slot]) -> Sequence[Sequence[int]]:
        """Equally many drafts for each response in row order."""
        if self._speculation is None:
            return [()] * len(live)
        return self._speculation.drafts(live, self._context_length, self._vocab_size)

    def _append(self, row: int, slot: Slot, token: int, logprob: float) -> TokenDelta:
        request = slot.request
        if not math.isfinite(logprob):
            raise EngineError(
                f"response {request.response}: log-prob {logprob} at token {slot.generated}; weights bad?"
            )
        slot.token_ids.append(token)
        reason = finish_reason(request, token, slot.generated, self._context_length)
        if reason is not None:
            self._table.leave(row)
            self._batch = None
        return TokenDelta(request.response, (token,), (logprob,), reason)

    def _fill(self, decoder: Decoder, cache: TokenCache, placements: Sequence[Placement]) -> None:
        """Fill the cache rows of new responses with all of their tokens but the last."""
        prompts = [p for p in placements if p.source is None and not p.reused]
        self._prefill(decoder, cache, [Piece(p.row, 0, p.request.prompt_ids[:-1]) for p in prompts])
        copies = [(p.source, p.row, p.reused) for p in placements if p.source is not None]
        if copies:
            sources, targets, lengths = zip(*copies, strict=True)
            cache.copy_rows(sources, targets, max(lengths))
        rest = [(p, p.reused or len(p.request.prompt_ids) - 1) for p in placements]
        tokens = [(p.row, first, p.request.prompt_ids + p.request.generated_ids) for p, first in rest]
        self._prefill(decoder, cache, [Piece(row, first, token_ids[first:-1]) for row, first, token_ids in tokens])

    def _prefill(self, decoder: Decoder, cache: TokenCache, pieces: Sequence[Piece]) -> None:
        for passed, token_ids, window in cache.prefill_windows(pieces):
            decoder.prefill(token_ids, window)
            self._prefill_tokens += sum(len(piece.token_ids) for piece in passed)


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name == "cuda" and not torch.cuda.is_available():
        raise EngineError("device: value 'cuda', and PyTorch sees no CUDA device; allowed here: 'cpu', 'auto'")
    if name not in ("cpu", "cuda"):
        raise EngineError(f"device: value {name!r}; allowed: 'auto', 'cpu', 'cuda'")
    return torch.device(name)
