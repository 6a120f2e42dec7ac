"""What it saves that a response which ended a turn finds its tokens still in its row of the key-value cache.

Responses with turns of 20 tokens of the policy and 5 of an observation are decoded by TorchEngine, or by vLLM with its
prefix cache, on a small random model. In the arm that starts again, the weights are loaded before each turn, so the
engine has forgotten all tokens; the time of the loading is not counted.
"""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from storage.noise_keys import noise_key
from storage.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.rollout import VllmConfig
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.vllm_engine import VllmEngine
from tasks.sampling.engines.weight_tensors import as_block

VOCABULARY = 512
PROMPT, TURN = 16, 20
OBSERVATION = (40, 41, 42, 43, 44)


@dataclass(frozen=True)
class Turns:
    """What an arm took: seconds of processor time, tokens prefilled, and the tokens of all responses."""

    cpu_s: float
    prefill_tokens: int
    token_ids: tuple[tuple[int, ...], ...]


Weights = Mapping[str, TensorBlock]


def turn_engine(
    folder: Path, responses: int, turns: int, kind: Literal["torch", "vllm"] = "torch"
) -> tuple[Engine, Weights]:
    """An engine with a row for each response, and its weights: those of a random Qwen2 with 3 million parameters.

    vLLM runs in this process, whose processor time is measured.
    """
    torch.manual_seed(0)
    context_length = PROMPT + turns * (TURN + len(OBSERVATION)) + 1
    model = Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY,
            hidden_size=256,
            intermediate_size=768,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=context_length,
            tie_word_embeddings=True,
        )
    )
    model.config.save_pretrained(folder)
    engine: Engine
    if kind == "torch":
        engine = TorchEngine(folder, device="cpu", max_responses_in_flight=responses, context_length=context_length)
    else:
        engine = VllmEngine(
            folder,
            vocab_size=VOCABULARY,
            dtype="float32",
            device="cpu",
            max_responses_in_flight=responses,
            context_length=context_length,
            config=VllmConfig(process="same"),
        )
    tensors: dict[str, Any] = dict(model.named_parameters())
    weights = {name: as_block(tensor) for name, tensor in tensors.items()}
    engine.load_weights(0, weights)
    return engine, weights


def decode_turns(engine: Engine, weights: Weights, responses: int, turns: int, *, reuses: bool) -> Turns:
    """Decode all turns of all responses; with `reuses` false, each turn is computed from its first token."""
    tokens: dict[int, tuple[int, ...]] = dict.fromkeys(range(responses), ())
    before, cpu_s = engine.prefill_tokens, 0.0
    engine.load_weights(0, weights)
    for _ in range(turns):
        if not reuses:
            engine.load_weights(0, weights)
        began_s = time.process_time()
        engine.start([_request(tokens[response], response) for response in tokens])
        while deltas := engine.step():
            for delta in deltas:
                tokens[delta.response] += delta.token_ids
        cpu_s += time.process_time() - began_s
        tokens = {response: (*written, *OBSERVATION) for response, written in tokens.items()}
    return Turns(cpu_s, engine.prefill_tokens - before, tuple(tokens.values()))


def _request(generated: tuple[int, ...], response: int) -> GenerationRequest:
    prompt = tuple((7 * response + 5 * place) % 400 + 50 for place in range(PROMPT))
    sampling = SamplingParams(max_completion_length=len(generated) + TURN)
    return GenerationRequest(response, response, prompt, generated, noise_key(3, 0, response), sampling)
