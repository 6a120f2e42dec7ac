"""The section `rollout`: the engine, and how members flush, look and give up."""

import json
from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from storage.digests import digest_of

STRICT = ConfigDict(extra="forbid", strict=True)

HEARTBEATS_PER_TTL_MIN = 3
LOOKS_PER_FLUSH = 5
# Longer than most engines need to start.
SEEDING_TTLS = 4
# Drafts of a response that an engine verifies in one step.
DRAFTS_MAX = 8
# Engines that verify drafts; "auto" may turn out to be either of the others.
DRAFTING_ENGINES = ("auto", "torch", "vllm")
# Engines of ours, which compute as the trainer does; "auto" may turn out to be another.
OUR_ENGINES = ("torch", "scripted")


@dataclass(frozen=True, kw_only=True)
class VllmConfig:
    """Settings for vLLM only; vLLM chooses everything that is not listed here itself.

    Attributes:
        process: "own" runs the engine in a process of its own, whose death the member survives; "same" starts in
            seconds and takes less memory, for many small members on one machine.
        batch_invariant: use vLLM's batch-invariant kernels where it has them; costs speed on a GPU. "auto" uses them
            if the loss does not correct for a sampler that differs from the trainer.
        gpu_memory_utilization: the share of the GPU's memory for weights, activations and cache.
        kv_cache_memory_bytes: the size of the key-value cache, in place of a share; None takes the share, and on a CPU
            enough for all responses, up to 4 GiB.
        tensor_parallel_size: the number of GPUs of one member; for more responses at once, use more slots.
        quantization: vLLM's name of a method, such as "fp8".
        max_lora_rank: With `lora.publish` "adapter", vLLM loads each version as an adapter beside version 0, of at most
            this rank; None: it gets merged weights.
        enforce_eager: whether vLLM runs without compiled graphs; None: on a CPU only.
        cache_dir: the directory in which vLLM, Triton and PyTorch keep compiled code, such as one on a volume that
            outlives the machine; None: below the home directory, and PyTorch's below TMPDIR.
    """

    __pydantic_config__ = STRICT
    process: Literal["own", "same"] = "own"
    batch_invariant: Literal[True, False, "auto"] = "auto"
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.9
    kv_cache_memory_bytes: Annotated[int, Field(ge=1 << 20)] | None = None
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    quantization: Annotated[str, Field(min_length=1)] | None = None
    max_lora_rank: Literal[8, 16, 32, 64, 128, 256, 320, 512] | None = None
    enforce_eager: bool | None = None
    cache_dir: Annotated[str, Field(min_length=1)] | None = None


# What may change within a run: all that changes no token.
OPERATIONAL_OF_VLLM = {item.name for item in fields(VllmConfig)} - {"batch_invariant", "quantization", "max_lora_rank"}


def _drafts(value: object) -> object:
    """The value if it is a number of drafts; raises ValueError with one line for both kinds."""
    if value == "auto" or (isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= DRAFTS_MAX):
        return value
    raise ValueError(f"allowed: an integer from 0 to {DRAFTS_MAX}, or auto")


Drafts = Annotated[Literal["auto"] | Annotated[int, Field(ge=0, le=DRAFTS_MAX)], BeforeValidator(_drafts)]


@dataclass(frozen=True, kw_only=True)
class SpeculationConfig:
    """How an engine decodes several tokens of a response in one step; no setting changes a token in float32.

    Attributes:
        drafts: the most tokens of a response that are guessed and verified in a step; 0 guesses nothing. "auto"
            follows the times of steps and the share of right guesses in the torch engine, and the number of responses
            in flight in vLLM.
        source: "siblings" guesses from responses to the same prompt; "ngram" guesses from the response alone;
            "draft_model" guesses by a smaller model.
        draft_model: With `source` "draft_model", a Hugging Face model directory where `plan` runs, or the id of a model
            on the hub. The tokenizer must be the policy's.
        revision: Of an id in `draft_model`: branch, tag or commit; None: main.
    """

    __pydantic_config__ = STRICT
    drafts: Drafts = 0
    source: Literal["siblings", "ngram", "draft_model"] = "siblings"
    draft_model: Annotated[str, Field(min_length=1)] | None = None
    revision: Annotated[str, Field(min_length=1)] | None = None

    def __post_init__(self) -> None:
        if (self.source == "draft_model") != (self.draft_model is not None):
            given = "missing" if self.draft_model is None else f"value {self.draft_model!r}"
            allowed = "a directory or an id of the hub" if self.draft_model is None else "null"
            raise ValueError(f"draft_model: {given}; allowed with source {self.source!r}: {allowed}")
        if self.revision is not None and self.draft_model is None:
            raise ValueError(f"revision: value {self.revision!r}; allowed without draft_model: null")

    @property
    def drafting_model(self) -> str | None:
        """The directory, or the id, of the model that drafts; None without drafts by a model."""
        return self.draft_model if self.drafts != 0 else None

    @property
    def model_copy(self) -> str:
        """The name of the run's copy of the draft model; another directory, id or revision has another name."""
        return f"draft-{digest_of(json.dumps([self.draft_model, self.revision]).encode())}"

    @property
    def from_siblings(self) -> bool:
        """Whether there are drafts from responses to the same prompt."""
        return self.drafts != 0 and self.source == "siblings"

    def keeps_tokens(self, dtype: str) -> bool:
        """Whether an engine draws the tokens that it would draw without drafts.

        Logits of a row depend in the last bits on how many rows are computed with it. Gaps between keyed scores are
        wide beside such bits of float32, and not of half precision.
        """
        return self.drafts == 0 or dtype == "float32"


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """The engine of a member and how often the member writes to storage.

    Attributes:
        crew: "iteration" starts members for each iteration; "standing" starts them once, and they work on all
            iterations of an execution with a warm engine.
        engine: "auto" takes vLLM if it is installed and finds a GPU, else our own engine in PyTorch; "scripted" has
            no model and is for tests and demonstrations.
        scripted_step_s: how long the scripted engine sleeps at each step, as an engine would compute.
        dtype: the dtype of the engine's weights, activations and cache; float32 on a CPU makes resumed responses
            identical.
        device: "auto" takes CUDA if there is a CUDA device.
        max_responses_in_flight: how many responses one member decodes together.
        context_length: the most tokens of prompt + response; None takes the model's max_position_embeddings.
        flush_interval_s: seconds between two journal shards of a member; a hard kill loses at most this much.
        claim_ttl_s: a member counts as dead once its heartbeat has not changed for this long, on the observer's clock.
        idle_timeout_s: how long a member without work waits for responses to become free before it leaves.
        weight_cache_bytes_max: the most bytes of weights that the processes of a machine keep in this user's directory
            below the temporary one (TMPDIR); 0 keeps none.
        speculation: see SpeculationConfig.
        vllm: see VllmConfig.
    """

    __pydantic_config__ = STRICT
    crew: Literal["iteration", "standing"] = "iteration"
    engine: Literal["auto", "torch", "vllm", "scripted"] = "auto"
    scripted_step_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    device: Literal["auto", "cpu", "cuda"] = "auto"
    max_responses_in_flight: Annotated[int, Field(ge=1)] = 64
    context_length: Annotated[int, Field(ge=2)] | None = None
    flush_interval_s: Annotated[float, Field(ge=0.05, le=60)] = 5.0
    claim_ttl_s: Annotated[float, Field(ge=0.003, allow_inf_nan=False)] = 30.0
    idle_timeout_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 120.0
    weight_cache_bytes_max: Annotated[int, Field(ge=0)] = 32 << 30
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    vllm: VllmConfig = field(default_factory=VllmConfig)

    def __post_init__(self) -> None:
        if self.speculation.drafts == 0:
            return
        if self.engine not in DRAFTING_ENGINES:
            raise ValueError(
                f"speculation.drafts: value {self.speculation.drafts}; allowed with engine {self.engine!r}: 0, because "
                "that engine verifies no drafts"
            )
        if self.engine != "torch":
            self._check_drafts_in_vllm()

    def _check_drafts_in_vllm(self) -> None:
        """Raise ValueError for what does not go together with drafts in vLLM."""
        drafts = f"speculation.drafts: value {self.speculation.drafts}; allowed with"
        if self.engine == "vllm" and self.device == "cpu":
            raise ValueError(f"{drafts} engine 'vllm' and device 'cpu': 0, because vLLM verifies drafts on GPUs alone")
        if self.vllm.max_lora_rank is not None:
            raise ValueError(
                f"{drafts} vllm.max_lora_rank {self.vllm.max_lora_rank}: 0, because vLLM's drafts are "
                "untried with adapters"
            )
        if self.vllm.batch_invariant is True and not self.speculation.keeps_tokens(self.dtype):
            raise ValueError(
                f"{drafts} vllm.batch_invariant true and dtype {self.dtype}: 0, because vLLM has no kernel that gives "
                "a row the same result with and without drafts"
            )

    @property
    def heartbeat_interval_s(self) -> float:
        """Seconds between two heartbeats of a member, and between two looks for work.

        A living member beats often enough within claim_ttl_s not to count as dead.
        """
        return min(self.flush_interval_s, self.claim_ttl_s / HEARTBEATS_PER_TTL_MIN)

    @property
    def poll_interval_s(self) -> float:
        """Seconds between two looks of the trainer at the journal."""
        return self.flush_interval_s / LOOKS_PER_FLUSH

    @property
    def seeding_after_s(self) -> float:
        """Seconds without a living member until the trainer's machines generate again, with planning.seeding "auto"."""
        return SEEDING_TTLS * self.claim_ttl_s
