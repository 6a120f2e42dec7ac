"""What training is said to take, against what it takes: the tensors of small models, and the peak of their passes."""

import weakref
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import Qwen2Config, Qwen2ForCausalLM

from resources.model_size import size_from_config
from tasks.configuration.lora import LoraConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.run_config import parse
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.adapted_policy import AdaptedPolicy
from tasks.learning.batching import collate
from tasks.learning.packing import pack
from tasks.learning.padding import SharedPrompt, passes
from tasks.learning.policy import Policy
from tasks.learning.restoring import optimizer_of
from tasks.learning.teachers import Teacher
from tasks.learning.token_logprobs import LOGIT_BYTES, chunk_rows, gpu_logits
from tasks.planning.trainer_memory import (
    Machine,
    activation_bytes,
    fits,
    head_chunk_bytes,
    kept_bytes,
    pass_tokens,
    scoring_bytes,
    trainer_memory,
    ways_to_fit,
)
from tests.covering import covering
from tests.forecast_documents import document

GIB = 1 << 30
NARROW = {"hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 4, "vocab_size": 1024}
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "vocab_size": 4096}


def config(trainer=None, **sections):
    return parse(document(trainer=trainer or {}, **sections))


class LiveTensors(TorchDispatchMode):
    """The bytes of the tensors that live, of those that operations within the block have made."""

    def __init__(self, outside):
        super().__init__()
        self.now = self.peak = 0
        self._known = {tensor.untyped_storage()._cdata for tensor in outside}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(found):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return found

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.peak = max(self.peak, self.now)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self._known.discard(key)
        self.now -= size


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """(directory, stored tensors in bfloat16, size) of each shape."""
    found = []
    for shape in (NARROW, WIDE):
        folder = tmp_path_factory.mktemp("model")
        settings = Qwen2Config(
            **shape,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1 << 16,
            tie_word_embeddings=shape is NARROW,
        )
        settings.save_pretrained(folder)
        torch.manual_seed(0)
        tensors = Qwen2ForCausalLM(settings).state_dict()
        tensors = {name: value.bfloat16() for name, value in tensors.items()}
        found.append((folder, tensors, size_from_config(settings.to_dict(), 2)))
    return found


def one_response(policy, tokens):
    vocabulary = policy.module.config.vocab_size
    return collate([0], [[1]], [[token % vocabulary for token in range(tokens - 1)]], [[0.0] * (tokens - 1)])


def peak(policy, batch):
    """The most that lives at a time in a pass and its backward pass, beside the model."""
    for parameter in policy.parameters().values():
        parameter.grad = torch.zeros_like(parameter)
    with torch.no_grad():
        policy.logprobs(collate([0], [[1]], [[2]], [[0.0]]), 1.0)
    outside = [*policy.memory(), *(parameter.grad for parameter in policy.parameters().values())]
    with LiveTensors(outside) as live:
        policy.objective(batch, 1.0, lambda logprobs, _rows: -logprobs)[2].backward()
    return live.peak


@pytest.mark.slow
@pytest.mark.parametrize(
    ("work", "dtype", "checkpointing"),
    covering([(0, 300), (0, 1600), (1, 500)], ["float32", "bfloat16"], [False, True]),
)
def test_a_pass_takes_three_quarters_to_six_fifths_of_what_the_formula_says(models, work, dtype, checkpointing):
    shape, tokens = work
    folder, tensors, size = models[shape]
    trainer = {"dtype": dtype, "gradient_checkpointing": checkpointing}
    policy = Policy(folder, tensors, TrainerConfig(device="cpu", **trainer))
    head = policy.module.get_output_embeddings().weight
    chunk = chunk_rows(head, None) * head.shape[0] * LOGIT_BYTES
    said = activation_bytes(config(trainer), size, tokens, chunk)
    found = peak(policy, one_response(policy, tokens))
    assert 0.75 <= found / said <= 1.2


@pytest.mark.slow
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_pass_of_many_short_answers_to_a_long_prompt_takes_no_more_than_the_formula_says(tmp_path, checkpointing):
    """Its tokens are few, and the prompt's keys are repeated for each answer, here with as many key heads as heads."""
    settings = Qwen2Config(**NARROW, num_attention_heads=4, num_key_value_heads=4, tie_word_embeddings=True)
    settings.save_pretrained(tmp_path)
    tensors = {name: value.bfloat16() for name, value in Qwen2ForCausalLM(settings).state_dict().items()}
    trainer = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
    policy = Policy(tmp_path, tensors, TrainerConfig(device="cpu", **trainer))
    pack(policy.module)
    prompt, answer, group, limit = list(range(800)), list(range(24)), 48, 2048
    shared = [SharedPrompt(0, len(prompt) - 1)] * group
    count = len(passes([len(prompt) + len(answer)] * group, limit, packed=True, prompts=shared)[0])
    batch = collate(range(count), [prompt] * count, [answer] * count, [[0.0] * len(answer)] * count)
    head = policy.module.get_output_embeddings().weight
    chunk = chunk_rows(head, None) * head.shape[0] * LOGIT_BYTES
    said = activation_bytes(config(trainer), size_from_config(settings.to_dict(), 2), limit, chunk)
    assert count > 2
    assert peak(policy, batch) <= 1.2 * said


@pytest.mark.slow
def test_a_pass_with_adapters_takes_at_most_what_the_formula_says(models):
    folder, tensors, size = models[0]
    for checkpointing in (False, True):
        trainer = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
        policy = AdaptedPolicy(folder, tensors, TrainerConfig(device="cpu", **trainer), LoraConfig(rank=4), seed=0)
        said = activation_bytes(config(trainer, lora={"rank": 4}), size, 1200, 1 << 22)
        assert 0.6 <= peak(policy, one_response(policy, 1200)) / said <= 1.2


@pytest.mark.parametrize(("shape", "dtype", "top_k"), [(0, "float32", 16), (1, "bfloat16", 256), (0, "bfloat16", None)])
def test_a_teachers_pass_and_weights_take_about_what_the_formulas_say(models, shape, dtype, top_k):
    folder, tensors, size = models[shape]
    settings = config({"dtype": dtype}, teacher={"path": str(folder), "top_k": top_k})
    teacher = Teacher(folder, tensors, TrainerConfig(device="cpu", dtype=dtype), trainable=False)
    batch = one_response(teacher, 300)
    head = teacher.module.get_output_embeddings().weight
    said = scoring_bytes(settings, size, 300, chunk_rows(head, None) * head.shape[0] * LOGIT_BYTES)
    with LiveTensors(teacher.memory()) as live:
        teacher.scores(batch, 1.0, top_k or 0, head.shape[0])
    assert 0.75 <= live.peak / said <= 1.2
    both = trainer_memory(settings, size, Machine(device_bytes=80 * GIB, teachers=(size, size)))
    assert both.teachers == pytest.approx(2 * sum(tensor.nbytes for tensor in teacher.memory()), rel=0.03)
    alone = trainer_memory(settings, size, Machine(device_bytes=80 * GIB))
    assert both.state - both.teachers == pytest.approx(alone.state)
    assert both.activations == max(alone.activations, scoring_bytes(settings, size, both.pass_tokens, 80 * GIB / 32))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype", "lora"),
    covering(["adamw", "adamw_8bit", "muon"], ["float32", "bfloat16"], [{}, {"lora": {"rank": 64}}]),
)
def test_the_state_is_as_large_as_it_is_said(models, name, dtype, lora):
    offload = "optimizer" if name == "muon" else "none"
    if name == "adamw_8bit":
        pytest.importorskip("torchao")
    folder, tensors, size = models[0]
    trainer = TrainerConfig(device="cpu", dtype=dtype, offload=offload)
    if not lora:
        policy = Policy(folder, tensors, trainer)
    else:
        policy = AdaptedPolicy(folder, tensors, trainer, LoraConfig(**lora["lora"]), seed=0)
    optimizer = optimizer_of(policy, OptimizerConfig(name=name), trainer)
    policy.logprobs(collate([0], [[1]], [[2]], [[0.0]]), 1.0)
    gradients = sum(parameter.nbytes for parameter in policy.parameters().values())
    model, moments = (sum(tensor.nbytes for tensor in each) for each in (policy.memory(), optimizer.state_tensors()))
    said = trainer_memory(
        config({"dtype": dtype, "offload": offload}, **lora, optimizer={"name": name}),
        size,
        Machine(device_bytes=80 * GIB),
    )
    on_host = moments if offload == "optimizer" else 0
    assert said.offloaded == pytest.approx(on_host, rel=0.03)
    assert said.state == pytest.approx(model + gradients + moments - on_host, rel=0.03)
    if not lora:
        stored = sum(t.nbytes for t in policy.parameters().values()) + moments
        expected = kept_bytes(OptimizerConfig(name=name)) * size.parameters
        # Muon's is without the share of the embedding, which nothing tells a fleet.
        assert stored == pytest.approx(expected, rel=0.15 if name == "muon" else 0.03)


def test_bytes_per_parameter_by_hand():
    _, size = (
        None,
        size_from_config(
            {
                "hidden_size": 4096,
                "num_hidden_layers": 32,
                "num_attention_heads": 32,
                "intermediate_size": 11008,
                "vocab_size": 32,
                "tie_word_embeddings": True,
            },
            2,
        ),
    )

    def each(trainer=None, processes=1, **sections):
        machine = Machine(device_bytes=80 * GIB, processes=processes)
        return trainer_memory(config(trainer, **sections), size, machine).state / size.parameters

    half = {"dtype": "bfloat16"}
    assert each() == 16
    assert each(half) == 18
    # Several ranks gather the copies of a layer at a time.
    assert each(half, processes=8) == 16
    assert each(half, optimizer={"name": "adamw_8bit"}) == 10 + 2.125
    assert each(half, optimizer={"name": "muon"}) == pytest.approx(14, abs=0.01)
    assert each(half | {"offload": "optimizer"}) == 10
    assert each(half, algorithm={"kl_coef": 0.1}) == 20
    assert each(half, algorithm={"advantage_estimator": "gae"}) == 36
    assert each(half, lora={"rank": 8}, algorithm={"kl_coef": 0.1}) == pytest.approx(2, abs=0.1)


def test_the_heads_chunk_is_never_larger_than_it_is_said():
    for memory in (8 * GIB, 24 * GIB, 80 * GIB, 141 * GIB, 192 * GIB):
        assert gpu_logits(memory) * LOGIT_BYTES <= head_chunk_bytes(memory) <= 2 * gpu_logits(memory) * LOGIT_BYTES


def test_a_pass_holds_one_response_if_that_is_longer_than_a_micro_batch():
    long = {"sampling": {"max_completion_length": 32768}, "data": {"source": "arithmetic", "max_prompt_length": 232}}
    assert pass_tokens(config({"micro_batch_tokens_max": 16384}, **long)) == 33000
    assert pass_tokens(config({"micro_batch_tokens_max": 100_000}, **long)) == 100_000


def qwen_7b():
    return size_from_config(
        {
            "hidden_size": 3584,
            "num_hidden_layers": 28,
            "num_attention_heads": 28,
            "num_key_value_heads": 4,
            "intermediate_size": 18944,
            "vocab_size": 152064,
        },
        2,
    )


def test_what_makes_a_response_of_32768_tokens_fit_one_gpu():
    long = config({"dtype": "bfloat16"}, sampling={"max_completion_length": 32768})
    memory = Machine(device_bytes=141e9)
    assert not fits(long, qwen_7b(), memory)
    ways = ways_to_fit(long, qwen_7b(), memory, fits)
    assert ways[0] == ("trainer.gradient_checkpointing: true with optimizer.name: adamw_8bit")
    changed = replace(
        long,
        trainer=replace(long.trainer, gradient_checkpointing=True),
        optimizer=replace(long.optimizer, name="adamw_8bit"),
    )
    assert fits(changed, qwen_7b(), memory)
    assert not fits(replace(long, trainer=changed.trainer), qwen_7b(), memory)
