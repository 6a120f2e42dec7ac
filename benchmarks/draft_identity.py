"""Drafts against plain decoding in five model families, with turns, and kills after which another drafter goes on.

Every few steps all engines' work is thrown away, as a kill does, and the responses go on in an engine with another
drafter and another number of drafts. A turn that ends by a stop token is answered, and the response goes on behind the
answer. Models are random. A part of benchmarks.speculation.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.draft_models import near_drafter
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.drafter import Drafter
from tasks.sampling.engines.engine import FinishReason, GenerationRequest
from tasks.sampling.engines.scripted_drafter import ScriptedDrafter, changing, perfect, wrong
from tasks.sampling.engines.speculation import Speculation
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block

FAMILIES = ("qwen2", "qwen3", "llama", "gpt_neox", "gpt2")
VOCAB_SIZE, CONTEXT_LENGTH, RESPONSES, ROWS, GENERATIONS = 96, 128, 256, 64, 8
ANSWER = (40, 41, 42, 43, 44)
SAMPLING = SamplingParams(max_completion_length=56, stop_token_ids=tuple(range(3, VOCAB_SIZE, 12)))
KILLED_EVERY, LOGPROBS_WITHIN = 6, 1e-4

Found = dict[int, tuple[list[int], list[float]]]
"""By response its tokens, with those of answers, and the log-probs of those that the policy wrote."""


def make_model(directory: Path, family: str) -> tuple[Path, dict[str, Tensor]]:
    """A random model of a family, whose distributions are neither flat nor certain."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - only where it is used

    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, trust_remote_code=False).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2:
                parameter.normal_(0.0, 0.25 if "embed" in name else 0.1)
    config.save_pretrained(directory)
    return directory, dict(model.named_parameters())


def requests_of(responses: int) -> list[GenerationRequest]:
    """Groups of equal prompts of several lengths."""
    groups = range(responses // GENERATIONS)
    prompts = [tuple((7 * k + 5 * i) % 80 + 4 for i in range(3 + 5 * (k % 4))) for k in groups]
    return [
        GenerationRequest(r, r // GENERATIONS, prompts[r // GENERATIONS], (), noise_key(9, 0, r), SAMPLING)
        for r in range(responses)
    ]


def decode(engines: Sequence[TorchEngine], requests: Sequence[GenerationRequest], killed_every: int) -> Found:
    """Decode all requests, each with all of its turns, `killed_every` steps in one engine and then in the next."""
    found: Found = {request.response: ([], []) for request in requests}
    waiting, flying = list(requests), dict[int, GenerationRequest]()
    for step in count():
        engine = engines[step // killed_every % len(engines)]
        if step % killed_every == 0 and flying:
            engines[(step // killed_every - 1) % len(engines)].abort(list(flying))
            waiting = [replace(each, generated_ids=tuple(found[r][0])) for r, each in flying.items()] + waiting
            flying = {}
        coming = waiting[: engine.max_responses_in_flight - len(flying)]
        engine.start(coming)
        flying |= {request.response: request for request in coming}
        del waiting[: len(coming)]
        if not flying:
            return found
        for delta in engine.step():
            tokens, logprobs = found[delta.response]
            tokens += delta.token_ids
            logprobs += delta.logprobs
            if delta.finish_reason is not None:
                request = flying.pop(delta.response)
                if (
                    delta.finish_reason is FinishReason.STOP
                    and len(tokens) + len(ANSWER) < SAMPLING.max_completion_length
                ):
                    tokens += ANSWER
                    waiting.insert(0, replace(request, generated_ids=tuple(tokens)))
    raise AssertionError


def drafters(wanted: Mapping[int, Sequence[int]], draft_model: Drafter) -> list[Drafter]:
    """Each life has the next of these drafters."""

    def answer(request: GenerationRequest) -> Sequence[int]:
        return wanted[request.response][len(request.generated_ids) :]

    def scripted(share: Callable[[int], float], **given: Any) -> Drafter:
        return ScriptedDrafter(VOCAB_SIZE, share, answer=answer, **given)

    return [
        scripted(perfect),
        SuffixDrafter(rows=ROWS, context_length=CONTEXT_LENGTH),
        scripted(lambda _: 0.8, ragged=True),
        draft_model,
        ScriptedDrafter(VOCAB_SIZE, wrong, ragged=True),
        scripted(changing),
        scripted(wrong),
        SuffixDrafter(rows=ROWS, context_length=CONTEXT_LENGTH, siblings=False),
        scripted(lambda _: 0.5),
    ]


def identical(found: Found, wanted: Found) -> int:
    """How many responses have the same tokens, each with the same log-prob."""

    def same(response: int) -> bool:
        (tokens, logprobs), (others, other_logprobs) = found[response], wanted[response]
        near = all(abs(a - b) <= LOGPROBS_WITHIN for a, b in zip(logprobs, other_logprobs, strict=False))
        return tokens == others and len(logprobs) == len(other_logprobs) and near

    return sum(map(same, wanted))


def families(directory: Path, names: Sequence[str] = FAMILIES, responses: int = RESPONSES) -> list[dict[str, Any]]:
    """By family, how many responses are identical when each life has another drafter, and drafts of each number."""
    table = []
    for name in names:
        folder, weights = make_model(directory / name, name)

        def engine(
            speculation: Speculation | None, folder: Path = folder, weights: dict[str, Tensor] = weights
        ) -> TorchEngine:
            made = TorchEngine(
                folder,
                device="cpu",
                max_responses_in_flight=ROWS,
                context_length=CONTEXT_LENGTH,
                speculation=speculation,
            )
            made.load_weights(0, {each: as_block(tensor.data) for each, tensor in weights.items()})
            return made

        requests = requests_of(responses)
        wanted = decode([engine(None)], requests, 1 << 30)
        tokens = {response: tokens for response, (tokens, _) in wanted.items()}
        # In the second pass each drafter has another number of drafts.
        for shift in (0, 5):
            near = near_drafter(folder, weights, VOCAB_SIZE, ROWS, CONTEXT_LENGTH)
            lives = [
                Speculation(drafter, 1 + (index + shift) % DRAFTS_MAX)
                for index, drafter in enumerate(drafters(tokens, near))
            ]
            found = decode([engine(each) for each in lives], requests, KILLED_EVERY)
            table.append(
                {
                    "family": name,
                    "drafts": "1 to 8, another at each kill",
                    "identical": identical(found, wanted),
                    "of": len(requests),
                    "turns answered": sum((len(each[0]) - len(each[1])) // len(ANSWER) for each in wanted.values()),
                    "accepted": sum(each.totals.accepted for each in lives),
                    "tokens": sum(len(logprobs) for _, logprobs in wanted.values()),
                }
            )
    return table
