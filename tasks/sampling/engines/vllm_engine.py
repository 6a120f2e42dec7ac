"""VllmEngine: vLLM as an `Engine`, for GPUs and, with vLLM's CPU build, for tests of the same path.

vLLM batches, schedules and caches. Our keyed noise draws the tokens inside it (vllm_sampler), its workers load weights
from memory (vllm_worker), and it runs in processes of its own or in ours (vllm_core).
"""

import itertools
import logging
import math
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from storage.records.draft_totals import DraftTotals, summed
from storage.records.records import SamplingParams
from storage.weights.adapters import BASE_VERSION
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.models.stored_names import has_experts
from tasks.sampling.engines.admission import check_idle, check_requests, check_sizes, finish_reason
from tasks.sampling.engines.decoder import model_config
from tasks.sampling.engines.engine import EngineDied, EngineError, FinishReason, GenerationRequest, TokenDelta
from tasks.sampling.engines.sibling_rows import LONGEST, scope_of
from tasks.sampling.engines.vllm_core import Core, CoreRequest, OwnProcess, SameProcess, WorkerCall
from tasks.sampling.engines.vllm_drafts import ended_totals
from tasks.sampling.engines.vllm_names import EXPERTS_ON_CPU, installed_version, resolve
from tasks.sampling.engines.vllm_settings import LIMITS, Limits, build_vllm_config, on_loopback, prepare_environment
from tasks.sampling.engines.vllm_warmup import warm_up
from tasks.sampling.engines.vllm_weights import VllmWeights, load_draft_model
from tasks.sampling.engines.weight_tensors import tensors_of_folder

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _InFlight:
    """A request in vLLM.

    Attributes:
        request: the request of the session.
        name: the name of the request in vLLM.
        generated: the number of tokens generated so far.
        begun: whether vLLM has returned a token of the request.
    """

    request: GenerationRequest
    name: str
    generated: int
    begun: bool = False


class VllmEngine:
    """An `Engine`; `load_weights` takes weights that transformers would load into the model's Hugging Face class."""

    def __init__(
        self,
        model_dir: Path | str,
        *,
        vocab_size: int,
        dtype: Literal["float32", "bfloat16", "float16"],
        max_responses_in_flight: int,
        context_length: int,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        config: VllmConfig | None = None,
        speculation: SpeculationConfig | None = None,
        keyed: bool = True,
        limits: Limits = LIMITS,
    ) -> None:
        """Start vLLM with random weights, which takes seconds to minutes.

        Args:
            model_dir: folder with a Hugging Face config.json; weights and tokenizer in it are not read.
            vocab_size: token ids are 0..vocab_size-1.
            dtype: the dtype of weights, activations and cache.
            max_responses_in_flight: the most responses that vLLM decodes together.
            context_length: the most tokens of prompt + response.
            device: the device that vLLM must find; "auto" takes the device of the installed build of vLLM.
            config: all other settings; None takes the defaults.
            speculation: where drafts come from, and how many; None: no drafts.
            keyed: our noise draws the tokens. False is for measurements of its cost: vLLM's own noise draws them, a
                resumed response continues otherwise, and log-probs are right at the temperatures 0 and 1 alone.
            limits: how long vLLM may take.

        Raises:
            EngineError: vLLM is missing, or refuses the model or a setting.
            EngineDied: vLLM does not start.
        """
        check_sizes(dtype, max_responses_in_flight, context_length)
        self._config = config or VllmConfig()
        self._speculation = speculation or SpeculationConfig()
        self._keyed = keyed
        self._limits = limits
        self._vocab_size = vocab_size
        self._context_length = context_length
        self._max_in_flight = max_responses_in_flight
        self._model_dir = Path(model_dir)
        self._dtype = dtype
        self._device = prepare_environment(self._config, limits)
        if not self._device or device not in ("auto", self._device):
            found = self._device or "no device"
            raise EngineError(f"rollout.device: value {device!r}, and vLLM {installed_version()} finds {found} here")
        self._module = module_of(self._model_dir)
        if self._device == "cpu" and has_experts(self._module):
            raise EngineError(EXPERTS_ON_CPU)
        self._folder = tempfile.TemporaryDirectory(prefix="gleaner-vllm-")
        self._in_flight: dict[int, _InFlight] = {}
        self._responses: dict[str, int] = {}
        self._names = (f"r{number}" for number in itertools.count())
        self._weights = VllmWeights(self._module, Path(self._folder.name), self._config)
        self._prefill_tokens = 0
        self._draft_totals = DraftTotals() if self._speculation.drafts != 0 else None
        self._core: Core | None = None
        try:
            self._core = self._started()
        except BaseException:
            self._folder.cleanup()
            raise

    @property
    def name(self) -> str:
        return self._name

    @property
    def batch_invariant(self) -> bool:
        """True on a CPU in float32 and with batch-invariant kernels, if noise is keyed and drafts keep tokens."""
        return self._batch_invariant and self._keyed

    @property
    def max_responses_in_flight(self) -> int:
        return self._max_in_flight

    @property
    def prefill_tokens(self) -> int:
        """Prompt and prefix tokens that vLLM computed, not found in its cache, for responses that have a token."""
        return self._prefill_tokens

    @property
    def draft_totals(self) -> DraftTotals | None:
        """See `Engine`. A response counts when it ends, so one that is aborted never does."""
        return self._draft_totals

    @property
    def weight_version(self) -> int | None:
        return self._weights.version

    @property
    def patch_base(self) -> int | None:
        return self._weights.version if self._weights.takes_patches else None

    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        """See `Engine`. A tied parameter may be given by one name or several; vLLM converts dtypes to its own.

        With `max_lora_rank`, the tensors of version 0 below an adapter are loaded once, and then adapters alone. Else
        PatchedWeights change the weights in place where the model and the device allow that.
        """
        core = self._alive()
        check_idle(version, self._in_flight)
        self._guarded(lambda: self._weights.load(core, version, tensors))

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """See `Engine`. vLLM computes prompts in its next steps, and the whole blocks of a group's prompt once."""
        core, version = self._loaded()
        check_requests(
            requests,
            self._in_flight,
            max_responses_in_flight=self._max_in_flight,
            vocab_size=self._vocab_size,
            context_length=self._context_length,
        )
        if not requests:
            return
        new = [_InFlight(request, next(self._names), len(request.generated_ids)) for request in requests]
        try:
            asked = [self._core_request(item, version) for item in new]
        except (ValueError, resolve("VLLMClientError")) as error:
            raise EngineError(f"vLLM refuses a request: {error}") from error
        self._guarded(lambda: core.start(asked))
        self._in_flight |= {item.request.response: item for item in new}
        self._responses |= {item.name: item.request.response for item in new}

    def step(self) -> list[TokenDelta]:
        """See `Engine`."""
        core, version = self._loaded()
        deadline_s = time.monotonic() + self._limits.step_s
        while self._in_flight:
            deltas = self._deltas(self._guarded(core.outputs), str(version))
            if deltas:
                return deltas
            if time.monotonic() > deadline_s:
                raise self._dead(EngineDied(f"vLLM has sent no token for {self._limits.step_s:g} s"))
        return []

    def abort(self, responses: Sequence[int]) -> None:
        core = self._alive()
        gone = [self._in_flight.pop(response) for response in responses if response in self._in_flight]
        for item in gone:
            del self._responses[item.name]
        if gone:
            self._guarded(lambda: core.abort([item.name for item in gone]))

    def remember(self, prompt_ids: Sequence[int], responses: Sequence[Sequence[int]]) -> None:
        """See `Remembers`. Without drafts from siblings nothing is taken in; vLLM's workers are not waited for.

        A response with a token that the model does not have is left out: vLLM feeds drafts unseen.
        """
        if self._core is not None and self._speculation.from_siblings:
            rows = [[*prompt_ids[-LONGEST:], *response][: self._context_length] for response in responses]
            known = [row for row in rows if row and min(row) >= 0 and max(row) < self._vocab_size]
            self._core.tell(WorkerCall("gleaner_remember", (scope_of(prompt_ids), known)))

    def restart(self) -> None:
        """See `Engine`. First ends what is left of the old vLLM, by force if need be."""
        self._end()
        try:
            self._core = self._started()
        except EngineDied:
            raise
        except EngineError as error:
            # vLLM accepted the same settings before, so it is the machine that has changed.
            raise EngineDied(str(error)) from error

    def close(self) -> None:
        """End vLLM; the engine cannot be used afterwards."""
        self._end()
        self._folder.cleanup()

    def _started(self) -> Core:
        began_s = time.monotonic()
        settings = build_vllm_config(
            self._config,
            self._speculation,
            self._model_dir,
            dtype=self._dtype,
            max_responses_in_flight=self._max_in_flight,
            context_length=self._context_length,
            architecture=type(self._module).__name__,
            on_cpu=self._device == "cpu",
            keyed=self._keyed,
        )
        with on_loopback():
            core = SameProcess(settings) if self._config.process == "same" else OwnProcess(settings, self._limits)
        try:
            if self._speculation.from_siblings:
                core.call(WorkerCall("gleaner_draft_from_siblings", ()))
            if (path := self._speculation.drafting_model) is not None:
                load_draft_model(core, module_of(Path(path)), tensors_of_folder(Path(path)), self._config)
            warmed_s = warm_up(core, self._like_a_runs, self._max_in_flight, self._limits.step_s)
        except BaseException:
            core.close()
            raise
        runner = "V2" if settings.use_v2_model_runner else "V1"
        kernels = self._device != "cpu" and os.environ.get("VLLM_BATCH_INVARIANT") == "1"
        self._batch_invariant = self._speculation.keeps_tokens(self._dtype) and (
            kernels or (self._device == "cpu" and self._dtype == "float32")
        )
        self._name = (
            f"vllm {installed_version()} {self._dtype} {self._device}, {'keyed' if self._keyed else 'unkeyed'} "
            f"sampling in runner {runner}{', batch-invariant kernels' if kernels else ''}"
            f"{', adapters beside the weights' if self._config.max_lora_rank is not None else ''}"
            f"{f', drafts by {self._speculation.source}' if self._speculation.drafts != 0 else ''}"
        )
        log.info("%s started in %.1f s; first steps %.1f s", self._name, time.monotonic() - began_s, warmed_s)
        return core

    def _like_a_runs(self, count: int) -> list[CoreRequest]:
        """Requests to warm up with: a prompt of one token, and two tokens to generate."""
        asked = [GenerationRequest(n, n, (0,), (), n, SamplingParams(max_completion_length=2)) for n in range(count)]
        return [self._core_request(_InFlight(request, next(self._names), 0), BASE_VERSION) for request in asked]

    def _end(self) -> None:
        self._in_flight, self._responses = {}, {}
        self._weights.forget()
        core, self._core = self._core, None
        if core is not None:
            core.close()

    def _alive(self) -> Core:
        if self._core is None:
            raise EngineDied("vLLM is not running; call restart first")
        return self._core

    def _loaded(self) -> tuple[Core, int]:
        core = self._alive()
        version = self._weights.version
        if version is None:
            raise EngineError("no weights are loaded; call load_weights first")
        return core, version

    def _guarded(self, call: Any) -> Any:
        """Return the result of a call of the core; if the core dies, end it, and nothing is in flight any more."""
        try:
            return call()
        except EngineDied:
            self._end()
            raise

    def _dead(self, error: EngineDied) -> EngineDied:
        self._end()
        return error

    def _core_request(self, item: _InFlight, version: int) -> CoreRequest:
        token_ids = [*item.request.prompt_ids, *item.request.generated_ids]
        return CoreRequest(item.name, token_ids, self._params(item.request), str(version), self._weights.adapter)

    def _params(self, request: GenerationRequest) -> Any:
        """The vLLM SamplingParams of a request."""
        sampling = request.sampling
        limit = min(sampling.max_completion_length, self._context_length - len(request.prompt_ids))
        given: dict[str, Any] = {
            "max_tokens": limit - len(request.generated_ids),
            "stop_token_ids": list(sampling.stop_token_ids),
            "ignore_eos": True,
            "logprobs": 0,
            "flat_logprobs": True,
            "detokenize": False,
            "output_kind": resolve("RequestOutputKind").DELTA,
            "skip_clone": True,
        }
        if self._keyed:
            from tasks.sampling.engines.vllm_sampler import encode_draw  # noqa: PLC0415 - it imports vLLM's model code

            draw = encode_draw(request.noise_key, len(request.prompt_ids), sampling, scope_of(request.prompt_ids))
            return resolve("SamplingParams")(temperature=0.0, extra_args=draw, **given)
        return resolve("SamplingParams")(
            temperature=sampling.temperature, top_p=sampling.top_p, top_k=sampling.top_k, **given
        )

    def _deltas(self, outputs: Sequence[Any], version: str) -> list[TokenDelta]:
        """Convert vLLM's outputs to at most one delta per response in flight."""
        tokens: dict[int, list[int]] = {}
        logprobs: dict[int, list[float]] = {}
        ended: list[int] = []
        for output in outputs:
            response = self._responses.get(output.request_id)
            if response is None:
                continue  # It was aborted meanwhile.
            item, completion = self._in_flight[response], output.outputs[0]
            if not item.begun and completion.token_ids:
                item.begun = True
                self._prefill_tokens += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            tokens.setdefault(response, []).extend(completion.token_ids)
            logprobs.setdefault(response, []).extend(completion.logprobs.logprobs if completion.logprobs else ())
            if output.finished:
                self._check_end(item, completion, version)
                ended.append(response)
                if self._draft_totals is not None:
                    new = item.generated - len(item.request.generated_ids) + len(tokens[response])
                    told = ended_totals(completion.spec_decode_metrics, new)
                    self._draft_totals = summed((self._draft_totals, told))
        deltas = [self._delta(response, ids, logprobs[response]) for response, ids in tokens.items() if ids]
        if left := [response for response in ended if response in self._in_flight]:
            raise self._dead(EngineDied(f"vLLM ended responses {left} before their end"))
        return deltas

    def _delta(self, response: int, token_ids: list[int], logprobs: list[float]) -> TokenDelta:
        item = self._in_flight[response]
        if len(logprobs) != len(token_ids) or not all(map(math.isfinite, logprobs)):
            raise EngineError(f"response {response}: log-probs {logprobs} for tokens {token_ids}; weights bad?")
        item.generated += len(token_ids)
        reason: FinishReason | None = finish_reason(item.request, token_ids[-1], item.generated, self._context_length)
        if reason is not None:
            del self._in_flight[response], self._responses[item.name]
        return TokenDelta(response, tuple(token_ids), tuple(logprobs), reason)

    def _check_end(self, item: _InFlight, completion: Any, version: str) -> None:
        """Raise EngineDied if vLLM ended a response for a reason of its own, or used weights other than the loaded."""
        if completion.finish_reason not in ("stop", "length"):
            raise self._dead(EngineDied(f"vLLM gave up response {item.request.response}: {completion.finish_reason}"))
        spans = {span.version for span in completion.weight_versions or ()}
        if spans - {version}:
            raise self._dead(EngineDied(f"vLLM used weights {sorted(spans)} instead of {version}"))


def module_of(model_dir: Path) -> Any:
    """The model's Hugging Face class without values, from its configuration alone; EngineError if there is none."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds to import

    config = model_config(model_dir)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)
