"""Engine: the protocol by which a session generates tokens from prompts, and the values that it exchanges.

An engine knows nothing of journals, claims or text: it takes token ids and returns token ids and log-probs. Every
engine passes tasks/sampling/engines/testing.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Protocol

from storage.errors import GleanerError
from storage.records.draft_totals import DraftTotals
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock


class FinishReason(Enum):
    """Why a response ended."""

    STOP = "stop"  # a stop token was sampled; it is the last token of the response
    LENGTH = "length"  # max_completion_length was reached, or the model's context by prompt + response


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """Extend one response: token k, counted from the prompt's end, is drawn with the noise of (noise_key, k).

    Attributes:
        response: the number of the response in the plan.
        group: the number of the group; requests of a group have equal prompt_ids, and an engine prefills them once.
        prompt_ids: the tokens of the prompt.
        generated_ids: the tokens generated so far: the first token sampled has position len(generated_ids), and
            sampling.max_completion_length - len(generated_ids) tokens remain.
        noise_key: the key of the response's noise, 64 bits without a sign.
        sampling: the sampling parameters of the plan.
    """

    response: int
    group: int
    prompt_ids: tuple[int, ...]
    generated_ids: tuple[int, ...]
    noise_key: int
    sampling: SamplingParams


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """New tokens of one response.

    Attributes:
        response: the number of the response in the plan.
        token_ids: the new tokens, in order.
        logprobs: the log-probs of the new tokens, natural log, under softmax(logits / temperature).
        finish_reason: why the response ends with the last of the tokens; None: the response goes on.
    """

    response: int
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish_reason: FinishReason | None


class EngineError(GleanerError):
    """The engine cannot serve the call: the request is bad, the weights do not fit, or the engine failed."""


class EngineDied(EngineError):  # noqa: N818 - reads as what happened
    """The engine broke down or does not answer, because of its memory, device or process, not because of a request.

    Tokens that `step` has returned are good. Until `restart`, only `close` may be called.
    """


class Engine(Protocol):
    """A continuous-batching decoder. One thread uses it; every call ends, if need be with EngineDied."""

    @property
    def name(self) -> str:
        """Engine, dtype and device in one text, for reports."""
        ...

    @property
    def batch_invariant(self) -> bool:
        """True when a response's tokens do not depend on batch mates, order or interruptions."""
        ...

    @property
    def max_responses_in_flight(self) -> int: ...

    @property
    def prefill_tokens(self) -> int:
        """Prompt and prefix tokens computed so far, for responses whose first token was returned."""
        ...

    @property
    def draft_totals(self) -> DraftTotals | None:
        """What drafts were worth so far; None if the engine decodes without. Any thread may ask."""
        ...

    @property
    def weight_version(self) -> int | None:
        """The version of the weights in place; None if there are none, as after a restart."""
        ...

    @property
    def patch_base(self) -> int | None:
        """The version in place, if `load_weights` can change it where PatchedWeights differ; None if it takes all."""
        ...

    def load_weights(self, version: int, tensors: Mapping[str, TensorBlock]) -> None:
        """Replace the weights in place and drop all caches computed with the old ones. No response may be in flight.

        Raises EngineError if names or shapes differ from the model's.
        """
        ...

    def start(self, requests: Sequence[GenerationRequest]) -> None:
        """Admit requests; at most max_responses_in_flight may be in flight. EngineError names a bad request."""
        ...

    def step(self) -> list[TokenDelta]:
        """Wait for new tokens of the responses in flight and return them, with at most one delta per response.

        A finished response leaves the engine with its last delta. The list is empty only when nothing is in flight.
        """
        ...

    def abort(self, responses: Sequence[int]) -> None:
        """Forget these responses; those that are not in flight are ignored."""
        ...

    def restart(self) -> None:
        """Start again after EngineDied, without weights and with nothing in flight. Raises EngineDied if that fails."""
        ...

    def close(self) -> None:
        """Free memory and end processes."""
        ...
