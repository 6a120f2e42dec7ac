"""Real optimizer steps and the weight versions they produce, by a small loop without journal and crew.

The project's own parts sample, grade and train. Policies are Qwen2 models with float32 parameters, published in
bfloat16.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from examples.warm_start import WarmStart, build_tokenizer, warm_start
from storage.journal.noise_keys import noise_key
from storage.records.records import SamplingParams
from storage.weights.tensor_sets import TensorBlock
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import ArithmeticConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.advantage import group_advantages
from tasks.learning.batching import collate
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.pretrained import read_tensors
from tasks.learning.step import accumulate, apply
from tasks.prompts.arithmetic import ArithmeticPrompts
from tasks.sampling.engines.engine import GenerationRequest
from tasks.sampling.engines.torch_engine import TorchEngine
from tasks.sampling.engines.weight_tensors import as_block, as_torch

TASK = ArithmeticConfig(items_max=6, stop_probability=0.35)
GROUPS, GENERATIONS, CONTEXT_LENGTH = 8, 8, 96
SAMPLING = SamplingParams(max_completion_length=64, stop_token_ids=(2,))


@dataclass(frozen=True)
class Step:
    """An optimizer step: the published weights before and after it, and the mean reward."""

    before: dict[str, TensorBlock]
    after: dict[str, TensorBlock]
    reward: float


def make_policy(directory: Path, warm_steps: int) -> Path:
    """The demo's policy of 0.4 million parameters, warm-started so that rewards differ within a group."""
    warm_start(
        directory, WarmStart(steps=warm_steps, batch=32, learning_rate=2e-3, task=TASK), lambda _step, _loss: None
    )
    return directory


def make_random_policy(directory: Path, *, hidden: int, layers: int) -> Path:
    """A random Qwen2 in bfloat16 with the demo's tokenizer, of any size."""
    from transformers import Qwen2Config, Qwen2ForCausalLM  # noqa: PLC0415 - only where it is used

    tokenizer = build_tokenizer()
    config = Qwen2Config(
        vocab_size=4096,
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 64,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    torch.manual_seed(0)
    Qwen2ForCausalLM(config).to(torch.bfloat16).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


def steps(model: Path, learning_rate: float, count: int) -> Iterator[Step]:
    """GRPO steps on the arithmetic task with its own reward, from the policy in `model` and zero AdamW moments."""
    tokenizer = AutoTokenizer.from_pretrained(str(model), local_files_only=True, trust_remote_code=False)
    start = {name: as_torch(block) for name, block in read_tensors(model).items()}
    policy = Policy(model, start, TrainerConfig())
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig(learning_rate=learning_rate))
    engine = TorchEngine(model, max_responses_in_flight=GROUPS * GENERATIONS, context_length=CONTEXT_LENGTH)
    problems = list(ArithmeticPrompts(GROUPS * count, 7, TASK))
    before = published(policy)
    for index in range(count):
        engine.load_weights(index, before)
        reward = _step(engine, policy, optimizer, tokenizer, problems[index * GROUPS : (index + 1) * GROUPS], index)
        after = published(policy)
        yield Step(before, after, reward)
        before = after
    engine.close()


def published(policy: Policy) -> dict[str, TensorBlock]:
    """The policy's tensors as `tasks.learning.train_iteration` publishes them in bfloat16."""
    return {name: as_block(tensor) for name, tensor in policy.tensors(torch.bfloat16).items()}


def _step(
    engine: TorchEngine, policy: Policy, optimizer: PolicyOptimizer, tokenizer: Any, problems: list[Any], index: int
) -> float:
    """Sample, grade, accumulate and step; returns the mean reward."""
    prompts = [tuple(tokenizer(problem.text_or_messages)["input_ids"]) for problem in problems]
    requests = [
        GenerationRequest(
            response,
            response // GENERATIONS,
            prompts[response // GENERATIONS],
            (),
            noise_key(1, index, response),
            SAMPLING,
        )
        for response in range(GROUPS * GENERATIONS)
    ]
    tokens: dict[int, list[int]] = {request.response: [] for request in requests}
    logprobs: dict[int, list[float]] = {request.response: [] for request in requests}
    engine.start(requests)
    while deltas := engine.step():
        for delta in deltas:
            tokens[delta.response] += delta.token_ids
            logprobs[delta.response] += delta.logprobs
    wanted = [problems[request.group].columns["worked"] for request in requests]
    texts = [tokenizer.decode(tokens[request.response], skip_special_tokens=True) for request in requests]
    rewards = torch.tensor([float(a == b) for a, b in zip(texts, wanted, strict=True)])
    algorithm = AlgorithmConfig()
    batch = collate(
        [request.response for request in requests],
        [request.prompt_ids for request in requests],
        list(tokens.values()),
        list(logprobs.values()),
    )
    advantages = group_advantages(rewards, GENERATIONS, scale_rewards="group", advantage_eps=algorithm.advantage_eps)
    totals = accumulate(
        policy, batch, advantages, algorithm, temperature=1.0, max_completion_length=SAMPLING.max_completion_length
    )
    apply(optimizer, totals, algorithm)
    return float(rewards.mean())
