"""The work of benchmarks.engine_parity: a model, responses and interruptions, and the comparison of answers.

It uses the `Engine` protocol and Hugging Face models, and knows neither vLLM nor TorchEngine.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.sampling.engines.engine import Engine, EngineDied, FinishReason, GenerationRequest
from tasks.sampling.engines.keyed_noise import sample, signed64
from tasks.sampling.engines.weight_tensors import as_block, as_torch

PROMPT_LENGTHS = (8, 60)
TWICE_CUT = 3  # every third response is cut twice
_STOP_TOKENS = list(range(2, 512, 42))
_WEIGHT_CHANGE = 0.2  # as a share of a matrix's standard deviation
# The sampling settings in a group, whose responses share a batch: half at temperature 1, and one of each other kind.
_PLAIN = SamplingParams()
KINDS = (
    _PLAIN,
    SamplingParams(temperature=0.7),
    _PLAIN,
    SamplingParams(top_p=0.9),
    _PLAIN,
    SamplingParams(top_k=50),
    _PLAIN,
    SamplingParams(temperature=0.0),
)


@dataclass(frozen=True, slots=True)
class Size:
    """groups: groups of one response per entry of KINDS. tokens: most per response. in_flight: decoded together."""

    groups: int
    tokens: int
    in_flight: int

    @property
    def context_length(self) -> int:
        return PROMPT_LENGTHS[1] + self.tokens


@dataclass(slots=True)
class Answer:
    """The tokens, log-probs and end of one response, as engines returned them.

    observed: by where it begins, the length of each observation among the tokens; its log-probs are 0.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    observed: dict[int, int] = field(default_factory=dict)

    @property
    def turn(self) -> list[int]:
        """The tokens since the last observation."""
        return self.token_ids[max((start + length for start, length in self.observed.items()), default=0) :]

    def observe(self, observation: Sequence[int]) -> None:
        """Add an observation."""
        self.observed[len(self.token_ids)] = len(observation)
        self.token_ids += observation
        self.logprobs += [0.0] * len(observation)
        self.finish_reason = None

    def cut(self, kept: int) -> bool:
        """Keep so many tokens; an observation whole or not at all. Returns whether a turn then waits for its answer."""
        inside = [start for start, length in self.observed.items() if start <= kept < start + length]
        kept = inside[0] if inside else kept
        del self.token_ids[kept:], self.logprobs[kept:]
        self.observed = {start: length for start, length in self.observed.items() if start < kept}
        self.finish_reason = None
        return bool(inside)


Tool = Callable[[Sequence[int]], Sequence[int] | None]


@dataclass(frozen=True, slots=True)
class Agreement:
    """identical: share of responses with equal tokens and ends. logprob_difference_max: up to the first difference."""

    identical: float
    logprob_difference_max: float


class Decoding:
    """Responses that one or several engines decode: their tokens so far, and the positions of their cuts.

    A response is removed from its engine at each of its cuts, keeps the tokens up to there, and waits to go on. The
    next response to begin or resume is drawn from `order`; without `order` it is the first that waits.

    With a tool, a stop token ends a turn, and the response goes on after the tool's observation, as a new request. A
    cut inside an observation leaves the turn without an answer, and the tool is asked again.
    """

    def __init__(
        self,
        requests: Sequence[GenerationRequest],
        cuts: Mapping[int, Sequence[int]] | None = None,
        order: random.Random | None = None,
        tool: Tool | None = None,
    ) -> None:
        """tool: the observation that follows the tokens of a turn, or None where the response ends."""
        self.answers = {request.response: Answer() for request in requests}
        self.interrupted: set[int] = set()
        self.prefill_naive = 0
        self._requests = {request.response: request for request in requests}
        self._cuts = {response: list(at) for response, at in (cuts or {}).items()}
        self._order = order
        self._tool = tool
        self._waiting = list(self._requests)
        self._in_flight: set[int] = set()
        self._unanswered: set[int] = set()

    @property
    def tokens(self) -> int:
        """The number of tokens in all answers so far."""
        return sum(len(answer.token_ids) for answer in self.answers.values())

    def run(self, engine: Engine, *, resume: bool = True, after_step: Callable[[], None] | None = None) -> None:
        """Decode until all have ended; without `resume`, until each has ended or reached its first cut.

        Raises:
            EngineDied: Responses in flight count as interrupted and wait.
        """
        aside: list[int] = []
        try:
            while self._waiting or self._in_flight:
                engine.start(self._next(engine.max_responses_in_flight - len(self._in_flight)))
                cut = self._take(engine)
                (self._waiting if resume else aside).extend(cut)
                engine.abort(cut)
                if after_step is not None:
                    after_step()
        except EngineDied:
            self._interrupt(sorted(self._in_flight))
            self._waiting += [*aside, *sorted(self._in_flight)]
            self._in_flight.clear()
            raise
        self._waiting = aside

    def _next(self, room: int) -> list[GenerationRequest]:
        """Requests for as many waiting responses as there is room for; they are then in flight."""
        chosen: list[GenerationRequest] = []
        while self._waiting and len(chosen) < room:
            index = self._order.randrange(len(self._waiting)) if self._order else 0
            response = self._waiting.pop(index)
            if response in self._unanswered:
                self._unanswered.remove(response)
                self._ask_tool(response)
            chosen.append(replace(self._requests[response], generated_ids=tuple(self.answers[response].token_ids)))
        self._in_flight.update(request.response for request in chosen)
        self.prefill_naive += sum(len(request.prompt_ids) + len(request.generated_ids) for request in chosen)
        return chosen

    def _take(self, engine: Engine) -> list[int]:
        """Add a step's tokens to the answers, and return the responses that reached a cut, truncated there."""
        cut = []
        for delta in engine.step():
            answer, cuts = self.answers[delta.response], self._cuts.get(delta.response)
            answer.token_ids += delta.token_ids
            answer.logprobs += delta.logprobs
            answer.finish_reason = delta.finish_reason
            goes_on = delta.finish_reason is FinishReason.STOP and self._ask_tool(delta.response)
            ended_at_cut = answer.finish_reason is not None and cuts == [len(answer.token_ids)]
            if cuts and len(answer.token_ids) >= cuts[0] and not ended_at_cut:
                # An engine in its own process may be some tokens further, which a journal would not hold either.
                if answer.cut(cuts.pop(0)):
                    self._unanswered.add(delta.response)
                cut.append(delta.response)
                self._in_flight.remove(delta.response)
            elif goes_on:
                self._waiting.append(delta.response)
                self._in_flight.remove(delta.response)
            elif answer.finish_reason is not None:
                self._in_flight.remove(delta.response)
        self._interrupt(cut)
        return cut

    def _ask_tool(self, response: int) -> bool:
        """Add the observation that follows the last turn; returns whether the response goes on."""
        answer = self.answers[response]
        observation = self._tool(answer.turn) if self._tool is not None else None
        if observation is None:
            return False
        if len(answer.token_ids) + len(observation) >= self._requests[response].sampling.max_completion_length:
            answer.finish_reason = FinishReason.LENGTH
            return False
        answer.observe(observation)
        return True

    def _interrupt(self, responses: Iterable[int]) -> None:
        self.interrupted.update(response for response in responses if self.answers[response].token_ids)


class ForwardPass:
    """The model as Hugging Face computes it: each response with its prompt in one pass, without a cache."""

    def __init__(self, model: Any, weights: Sequence[Mapping[str, TensorBlock]]) -> None:
        """weights: by version; a version is loaded into the model when it is needed."""
        self._model = model
        self._weights = weights
        self._version: int | None = None
        self._known: dict[tuple[int, int, tuple[int, ...]], tuple[list[int], list[float]]] = {}

    def agreement(
        self, version: int, requests: Sequence[GenerationRequest], answers: Mapping[int, Answer]
    ) -> Agreement:
        """Compare answers with the tokens that keyed noise draws from the model's logits after the same tokens.

        Observations are given, not drawn. Log-probs are those of the answers' tokens, whether or not the model would
        have drawn these.
        """
        differences, identical = [0.0], 0
        for request in requests:
            answer = answers[request.response]
            drawn, logprobs = self._of(version, request, tuple(answer.token_ids))
            given = {place for start, length in answer.observed.items() for place in range(start, start + length)}
            own = [place for place in range(len(drawn)) if place not in given]
            identical += all(drawn[place] == answer.token_ids[place] for place in own)
            differences += [abs(answer.logprobs[place] - logprobs[place]) for place in own]
        return Agreement(identical / len(requests), max(differences))

    @torch.inference_mode()
    def _of(
        self, version: int, request: GenerationRequest, token_ids: tuple[int, ...]
    ) -> tuple[list[int], list[float]]:
        """The tokens drawn at each position of the response, and the log-probs of the tokens that it has there."""
        known = self._known.get((version, request.response, token_ids))
        if known is not None:
            return known
        if self._version != version:
            for name, parameter in self._model.named_parameters():
                parameter.copy_(as_torch(self._weights[version][name]))
            self._version = version
        sampling, count, device = request.sampling, len(token_ids), self._model.device
        known_ids = torch.tensor([[*request.prompt_ids, *token_ids]], device=device)
        logits = self._model(known_ids, use_cache=False).logits[0, len(request.prompt_ids) - 1 : -1].float()
        drawn, _ = sample(
            logits,
            torch.full((count,), signed64(request.noise_key), device=device),
            torch.arange(count, device=device),
            torch.full((count,), sampling.temperature, device=device),
            torch.full((count,), sampling.top_p, device=device),
            torch.full((count,), sampling.top_k, dtype=torch.int64, device=device),
        )
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), dim=-1)
        of_tokens = logprobs.gather(1, known_ids[0, -count:].unsqueeze(1)).squeeze(1)
        found = self._known[version, request.response, token_ids] = (drawn.tolist(), of_tokens.tolist())
        return found


def compare(found: Mapping[int, Answer], wanted: Mapping[int, Answer]) -> Agreement:
    """Compare two sets of answers to the same requests; ValueError if the requests differ."""
    if found.keys() != wanted.keys():
        raise ValueError(f"answers to {sorted(found.keys() ^ wanted.keys())} are on one side only")
    differences, identical = [0.0], 0
    for response, answer in found.items():
        other = wanted[response]
        identical += (answer.token_ids, answer.finish_reason, answer.observed) == (
            other.token_ids,
            other.finish_reason,
            other.observed,
        )
        for here, there, a, b in zip(answer.token_ids, other.token_ids, answer.logprobs, other.logprobs, strict=False):
            if here != there:
                break
            differences.append(abs(a - b))
    return Agreement(identical / len(found), max(differences))


def requests_for(size: Size, vocab_size: int, stop_token_ids: tuple[int, ...]) -> list[GenerationRequest]:
    """The requests of size.groups groups with random prompts, the same every time."""
    rnd = random.Random(0)
    requests: list[GenerationRequest] = []
    for group in range(size.groups):
        prompt = tuple(rnd.randrange(vocab_size) for _ in range(rnd.randint(*PROMPT_LENGTHS)))
        for kind in KINDS:
            response = len(requests)
            sampling = replace(kind, max_completion_length=size.tokens, stop_token_ids=stop_token_ids)
            requests.append(GenerationRequest(response, group, prompt, (), noise_key(1, 0, response), sampling))
    return requests


def echo_tool(vocab_size: int, stop_token_ids: Sequence[int]) -> Tool:
    """A deterministic tool: it answers a turn with up to nine tokens that follow from the turn's tokens.

    A turn that ends with the first stop token calls nothing, so the response ends. No observation has a stop token.
    """
    allowed = [token for token in range(vocab_size) if token not in stop_token_ids]

    def answer(turn: Sequence[int]) -> list[int] | None:
        if turn[-1] == stop_token_ids[0]:
            return None
        state, found = sum(turn), []
        for place in range(3 + state % 7):
            state = (31 * state + turn[place % len(turn)] + place) % vocab_size
            found.append(allowed[state % len(allowed)])
        return found

    return answer


def random_cuts(answers: Mapping[int, Answer], rnd: random.Random) -> dict[int, list[int]]:
    """Draw the cuts of each response: one random token, two for some, and none for a response of one token.

    Tokens of observations are drawn as well as others.
    """
    cuts = {}
    for response, answer in answers.items():
        places = range(1, len(answer.token_ids))
        cuts[response] = sorted(rnd.sample(places, min(len(places), 2 if response % TWICE_CUT == 0 else 1)))
    return cuts


def random_model() -> Any:
    """A random Qwen2 of 0.9 million parameters, in float32 on the CPU; its distributions are neither flat nor certain.

    Heads are 64 wide, because vLLM has CPU kernels for few widths.
    """
    config = AutoConfig.for_model(
        "qwen2",
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        tie_word_embeddings=True,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=_STOP_TOKENS,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
        randomise(model, config.hidden_size)
    return model


@torch.no_grad()
def randomise(model: Any, hidden: int) -> None:
    """Give a model of this hidden size parameters with which its distributions are neither flat nor certain."""
    narrower = math.sqrt(128 / hidden)
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2:
            parameter.normal_(0.0, narrower * (0.2 if "embed" in name else 0.08))
        elif "bias" in name:
            parameter.normal_(0.0, 0.1)
        else:
            parameter.uniform_(0.8, 1.2)


def stop_tokens(config: Any) -> tuple[int, ...]:
    """The stop tokens of a Hugging Face configuration; there may be none."""
    ids = config.get_text_config().eos_token_id
    return tuple(ids) if isinstance(ids, list) else () if ids is None else (ids,)


def weight_versions(model: Any) -> list[dict[str, TensorBlock]]:
    """Version 0, the model's parameters (tied ones once), and version 1, the same with noise in every matrix."""
    generator = torch.Generator().manual_seed(1)
    first, second = {}, {}
    for name, parameter in model.named_parameters():
        tensor = parameter.detach().to("cpu", copy=True)
        first[name] = as_block(tensor)
        if tensor.ndim == 2:
            noise = torch.randn(tensor.shape, generator=generator) * tensor.float().std() * _WEIGHT_CHANGE
            tensor = (tensor.float() + noise).to(tensor.dtype)
        second[name] = as_block(tensor)
    return [first, second]
