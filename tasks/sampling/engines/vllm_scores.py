"""VllmScorer: vLLM tells a model's log-probs of given tokens, and the most likely tokens at each place.

vLLM tells log-probs of given tokens of a prompt alone (`prompt_logprobs`), so each sequence is a prompt. One token is
generated behind the prompt, which vLLM cannot leave out, and is thrown away. vLLM computes such prompts whole, and
never reads the prefix cache for a prompt with log-probs.
"""

import itertools
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from storage.weights.adapters import BASE_VERSION
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import SpeculationConfig, VllmConfig
from tasks.models.stored_names import has_experts
from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.vllm_core import Core, CoreRequest, OwnProcess, SameProcess, WorkerCall
from tasks.sampling.engines.vllm_engine import module_of
from tasks.sampling.engines.vllm_names import EXPERTS_ON_CPU, installed_version, resolve
from tasks.sampling.engines.vllm_settings import LIMITS, Limits, build_vllm_config, on_loopback, prepare_environment
from tasks.sampling.engines.vllm_weights import VllmWeights

SEQUENCES_MAX = 16
# Runner V1 of vLLM holds the logits of a step beside vLLM's share of a GPU's memory: 3 GB with 152,000 tokens.
STEP_TOKENS = 2048


@dataclass(frozen=True)
class PromptScores:
    """What a model says of the tokens of a sequence but the first, n - 1 of n.

    Attributes:
        ids: int64 [n - 1, 1 + K], the token itself, then the K most likely tokens at its place, the likeliest first.
        logprobs: float32 [n - 1, 1 + K], of `ids`.
    """

    ids: npt.NDArray[np.int64]
    logprobs: npt.NDArray[np.float32]


class VllmScorer:
    """A running vLLM with the weights of one model, used by one thread. After EngineDied, only `close` may be called.

    Attributes:
        name: vLLM's release, the dtype and the device.
    """

    def __init__(
        self,
        model_dir: Path,
        tensors: Mapping[str, TensorBlock],
        *,
        dtype: Literal["float32", "bfloat16", "float16"],
        longest: int,
        top_k: int,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        config: VllmConfig | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        """Start vLLM, which takes seconds to minutes.

        Args:
            model_dir: folder with a Hugging Face config.json.
            tensors: the weights, as transformers would load them into the model's class.
            dtype: the dtype of weights, activations and cache.
            longest: the most tokens of a sequence; less than the model's positions.
            top_k: the number of most likely tokens, at least 1.
            device: the device that vLLM must find; "auto" takes the device of the installed build of vLLM.
            config: all other settings; None takes the defaults.
            limits: how long vLLM may take.

        Raises:
            EngineError: vLLM is missing, refuses the model or a setting, or the tensors are not the model's.
            EngineDied: vLLM does not start.
        """
        config = config or VllmConfig()
        found = prepare_environment(config, limits)
        if not found or device not in ("auto", found):
            raise EngineError(
                f"trainer.device: value {device!r}, and vLLM {installed_version()} finds {found or 'no device'} here"
            )
        module = module_of(model_dir)
        if found == "cpu" and has_experts(module):
            raise EngineError(EXPERTS_ON_CPU)
        settings = build_vllm_config(
            config,
            SpeculationConfig(),
            model_dir,
            dtype=dtype,
            max_responses_in_flight=SEQUENCES_MAX,
            context_length=longest + 1,
            architecture=type(module).__name__,
            on_cpu=found == "cpu",
            keyed=False,
            further={
                "max_logprobs": top_k,
                "max_num_batched_tokens": STEP_TOKENS,
                "enable_prefix_caching": False,
            },
        )
        self.name = f"vllm {installed_version()} {dtype} {found}"
        self._top_k = top_k
        self._names = (f"s{number}" for number in itertools.count())
        self._told: tuple[float, int] | None = None
        with on_loopback():
            self._core: Core = SameProcess(settings) if config.process == "same" else OwnProcess(settings, limits)
        try:
            with tempfile.TemporaryDirectory(prefix="gleaner-vllm-") as folder:
                VllmWeights(module, Path(folder), config).load(self._core, BASE_VERSION, tensors)
        except BaseException:
            self.close()
            raise

    def scores(self, sequences: Sequence[Sequence[int]], *, temperature: float, vocabulary: int) -> list[PromptScores]:
        """The scores of sequences of at least two tokens, in order.

        temperature: the divisor of the logits. vocabulary: the number of tokens, from the first on, over which
        distributions are normalised. Raises EngineError for a sequence that vLLM refuses, and EngineDied.
        """
        if self._told != (temperature, vocabulary):
            self._core.call(WorkerCall("gleaner_score", (temperature, vocabulary)))
            self._told = (temperature, vocabulary)
        asked = {next(self._names): list(tokens) for tokens in sequences}
        self._core.start([CoreRequest(name, tokens, self._params(), "") for name, tokens in asked.items()])
        found: dict[str, PromptScores] = {}
        while len(found) < len(asked):
            for output in self._core.outputs():
                # A refused call's requests were aborted, and may still be told of.
                if output.finished and output.request_id in asked:
                    found[output.request_id] = self._read(asked[output.request_id], output.prompt_logprobs)
        return [found[name] for name in asked]

    def close(self) -> None:
        """End vLLM."""
        self._core.close()

    def _params(self) -> Any:
        return resolve("SamplingParams")(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            prompt_logprobs=self._top_k,
            flat_logprobs=True,
            detokenize=False,
            output_kind=resolve("RequestOutputKind").FINAL_ONLY,
            skip_clone=True,
        )

    def _read(self, tokens: Sequence[int], told: Any) -> PromptScores:
        """The scores of a sequence from vLLM's flat lists, which have nothing for the first token."""
        shape = (len(tokens) - 1, 1 + self._top_k)
        ids = np.asarray(() if told is None else told.token_ids, dtype=np.int64)
        logprobs = np.asarray(() if told is None else told.logprobs, dtype=np.float32)
        if ids.size != shape[0] * shape[1] or ids.size != logprobs.size:
            raise EngineDied(f"vLLM told {ids.size} log-probs of {len(tokens)} tokens with heads of {self._top_k}")
        ids = ids.reshape(shape)
        if not np.array_equal(ids[:, 0], tokens[1:]):
            raise EngineDied("vLLM told log-probs of other tokens than were asked for")
        return PromptScores(ids, logprobs.reshape(shape))
