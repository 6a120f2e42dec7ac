"""Passes without padding: what they compute is what padded ones do, and models that cannot have them are found."""

import logging
from itertools import product

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    Lfm2Config,
    LlamaConfig,
    MistralConfig,
    PhimoeConfig,
    Qwen2MoeConfig,
    Qwen3Config,
)

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.trainer import TrainerConfig
from tasks.learning import packing
from tasks.learning.batching import collate, dealt_passes
from tasks.learning.critic import Critic
from tasks.learning.faster_passes import pack_models
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.packed_row import packed_row
from tasks.learning.packing import NotPackedError, is_packed, pack, pack_if_equal
from tasks.learning.padding import REPEATED_PER_TOKEN, SharedPrompt, padded_tokens, passes
from tasks.learning.policy import Policy, probe
from tasks.learning.step import accumulate
from tests.tasks.learning.refusing_kernels import REFUSAL, attention_without_backward
from tests.tasks.learning.tiny_model import VOCABULARY

CPU = TrainerConfig(device="cpu")
LIMITS = {"temperature": 0.7, "max_completion_length": 16}
SIZES = {"num_attention_heads": 4, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 64}
SMALL = SIZES | {"vocab_size": VOCABULARY, "max_position_embeddings": 64, "num_key_value_heads": 2}
# Positions that are learned, a head of its own size with norms, and layers that see the last few tokens only.
ARCHITECTURES = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL, head_dim=16),
    "sliding": MistralConfig(**SMALL, sliding_window=4),
    "gpt2": GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}


def of(config, directory, seed=0):
    """A random policy of an architecture, in float64."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config)
    config.save_pretrained(directory)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    policy = Policy(directory, dict(model.state_dict()), CPU)
    policy.module.double()
    return policy


def gradient_of(policy, batch, advantages, algorithm, **more):
    totals = accumulate(policy, batch, advantages, algorithm, **LIMITS, **more)
    found = {name: parameter.grad for name, parameter in policy.parameters().items()}
    policy.drop_gradient()
    return totals, found


def in_turns(rows):
    """The rows, with an observation in the middle of each completion of three tokens or more."""
    ids, prompts, completions, logprobs = rows
    origins = [(1, 1, len(row) - 2) if len(row) > 2 else (len(row),) for row in completions]
    kept = [row[:1] + row[2:] if len(row) > 2 else row for row in logprobs]
    return ids, prompts, completions, kept, origins


def in_groups(rows):
    """The rows with three prompts for all of them, one of them of a token; the groups lie between each other."""
    ids, prompts, *others = rows
    shared = [[5, 1, 4, 2, 3], [7], prompts[0]]
    return ids, [shared[index % 3] for index in range(len(prompts))], *others


@pytest.mark.parametrize("has_groups", [False, True], ids=["prompts", "shared prompts"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_log_probs_and_gradients_are_those_of_padded_passes(tmp_path, ragged, name, has_groups):
    rows = ragged(7, seed=3)
    batch, found = collate(*(in_groups(rows) if has_groups else rows)), []
    for packed in (False, True):
        policy = of(ARCHITECTURES[name], tmp_path)
        if packed:
            pack(policy.module)
        logprobs, entropy = policy.logprobs(batch, 1.0)
        (logprobs.sum(dim=1) ** 2).sum().backward()
        found.append([logprobs, entropy, *(parameter.grad for parameter in policy.parameters().values())])
    # Norms of these models round a shared prompt's summed gradient to float32, and GPT-2's do not.
    rounding = 1e-6 if has_groups and name != "gpt2" else 1e-11
    for padded, without in zip(*found, strict=True):
        torch.testing.assert_close(
            without, padded, rtol=1e-9, atol=rounding * max(1, float(padded.detach().abs().max()))
        )


LOSSES = [
    ("clip", "token-mean"),
    ("clip", "seq-mean-token-sum-norm"),
    ("gspo", "seq-mean-token-mean"),
    ("cispo", "token-mean"),
    ("reinforce", "seq-mean-token-sum"),
    ("tests.own_losses:clipped", "token-mean"),
    ("tests.own_losses:of_whole_responses", "seq-mean-token-mean"),
]


@pytest.mark.slow
@pytest.mark.parametrize("has_turns", [False, True], ids=["one turn", "turns"])
@pytest.mark.parametrize(
    "more",
    [
        {"old_logprobs": "sampler"},
        {"importance_sampling": "token"},
        {"importance_sampling": "sequence-mask", "kl_coef": 0.1},
    ],
    ids=["sampler", "weights", "masked"],
)
def test_every_loss_is_that_of_padded_passes(build, ragged, more, has_turns):
    rows = in_groups(ragged(6, seed=5))
    batch = collate(*(in_turns(rows) if has_turns else rows))
    assert batch.repeated_tokens
    advantages = {
        1: torch.randn(6, dtype=torch.float64, generator=torch.Generator().manual_seed(3)),
        2: torch.randn(batch.response_mask.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(4)),
    }
    padded, packed = build(double=True), build(double=True)
    pack(packed.module)
    references = [build(trainable=False, double=True) for _ in range(2)]
    for reference in references:
        with torch.no_grad():
            for parameter in reference.parameters().values():
                parameter.mul_(1.05)
    pack(references[1].module)
    for (policy_loss, mode), dims in product(LOSSES, advantages):
        algorithm = AlgorithmConfig(policy_loss=policy_loss, loss_agg_mode=mode, **more)
        (totals, gradient), (without, its_gradient) = (
            gradient_of(policy, batch, advantages[dims], algorithm, reference=reference)
            for policy, reference in zip((padded, packed), references, strict=True)
        )
        expected = totals.metrics(mode)
        assert expected.pop("padding_share") == pytest.approx(1 - sum(batch.total_lengths) / batch.input_ids.numel())
        found = without.metrics(mode)
        assert found.pop("padding_share") == 0
        assert expected.pop("shared_prompt_share") == 0
        assert found.pop("shared_prompt_share") == batch.repeated_tokens / sum(batch.total_lengths)
        assert found == pytest.approx(expected, rel=1e-9, abs=1e-11)
        for name, value in gradient.items():
            # Norms round a shared prompt's summed gradient to float32.
            torch.testing.assert_close(its_gradient[name], value, rtol=1e-8, atol=1e-6 * float(value.abs().max()))


def test_recomputed_activations_are_packed_too(build, ragged):
    batch = collate(*in_groups(ragged()))
    gradients = []
    for checkpointing in (False, True):
        policy = build(gradient_checkpointing=checkpointing, double=True)
        pack(policy.module)
        policy.logprobs(batch, 1.0)[0].sum().backward()
        gradients.append({name: parameter.grad for name, parameter in policy.parameters().items()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-9, atol=1e-11)


def test_the_kernel_of_a_gpu_takes_what_it_is_given():
    query, key = (torch.empty(1, heads, 10, 16, dtype=torch.bfloat16, device="meta") for heads in (4, 2))
    bounds = torch.empty(4, dtype=torch.int32, device="meta")
    for window in (None, 4):
        assert packing._on_gpu(query, key, key, 0.25, window, (bounds, bounds), (5, 5)).shape == (1, 10, 4, 16)


def test_all_models_of_a_learner_are_packed(model, build, ragged):
    batch = collate(*in_groups(ragged()))
    policy, reference = build(), build(trainable=False)
    critic = Critic.of_policy(*model, CPU)
    with torch.no_grad():
        critic.module.value_head.weight.normal_(generator=torch.Generator().manual_seed(1))
    before = critic.values(batch)
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig())
    learner = Learner(policy, optimizer, reference, CriticLearner(critic, optimizer))
    assert not learner.is_packed
    pack_models(learner)
    assert learner.is_packed
    assert is_packed(reference.module)
    assert is_packed(critic.module.model)
    torch.testing.assert_close(critic.values(batch), before, rtol=1e-4, atol=1e-5)


def test_a_model_that_computes_something_else_stays_padded(tmp_path, caplog):
    # With positions enough for a row of all responses.
    policy = of(GPT2Config(**ARCHITECTURES["gpt2"].to_dict() | {"n_positions": 256}), tmp_path)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.mul_(4)

    def without_positions(_model, given, named):
        return given, {**named, "position_ids": None}

    # It counts positions through the whole row.
    policy.module.base_model.register_forward_pre_hook(without_positions, with_kwargs=True)
    batch = probe(policy, (1, 3, 2))
    expected = policy.logprobs(batch, 1.0)[0]
    with caplog.at_level(logging.INFO, logger="gleaner"):
        equal = pack_if_equal(policy.module, lambda batch: policy.logprobs(batch, 1.0)[0], batch)
    assert not equal, torch.dist(policy.logprobs(batch, 1.0)[0], expected)
    assert "passes of GPT2LMHeadModel are padded: its log-probs are " in caplog.text
    assert torch.equal(policy.logprobs(batch, 1.0)[0], expected)


# A convolution passes the end of one response on to the next; layers of the others tell a mask alone of their window.
CARRYING = Lfm2Config(
    **SMALL, layer_types=["conv", "full_attention"], block_ff_dim=64, block_auto_adjust_ff_dim=False, pad_token_id=0
)
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
MASKING = Qwen2MoeConfig(
    **SMALL, **EXPERTS, use_sliding_window=True, sliding_window=100, layer_types=["full_attention", "sliding_attention"]
)
ALL_MASKING = PhimoeConfig(**SMALL, num_local_experts=4, sliding_window=100)


@pytest.mark.parametrize(
    ("config", "reason"),
    [(CARRYING, "another response's tokens"), (MASKING, "only a mask tells"), (ALL_MASKING, "only a mask tells")],
    ids=["state", "mask", "all masks"],
)
def test_a_model_that_would_attend_to_more_stays_padded(tmp_path, config, reason, caplog):
    policy = of(config, tmp_path)
    with torch.no_grad():
        for parameter in policy.parameters().values():
            parameter.mul_(2)
    optimizer = PolicyOptimizer(policy.parameters(), OptimizerConfig())
    with caplog.at_level(logging.INFO, logger="gleaner"):
        pack_models(Learner(policy, optimizer, None))
    assert not is_packed(policy.module)
    assert reason in caplog.text


@pytest.mark.parametrize("asked", ["softcap", "s_aux", "position_bias"])
def test_an_attention_of_another_kind_is_refused(build, batch, asked, monkeypatch, caplog):
    policy = build()
    attention = packing._attention
    monkeypatch.setattr(packing, "_attention", lambda *given, **named: attention(*given, **named, **{asked: 30.0}))
    batch = probe(policy, (1, 2))
    with caplog.at_level(logging.INFO, logger="gleaner"):
        assert not pack_if_equal(policy.module, lambda batch: policy.logprobs(batch, 1.0)[0], batch)
    assert f"NotPackedError: Qwen2Attention has {asked}" in caplog.text
    with pytest.raises(NotPackedError, match=f"^Module has {asked}$"):
        attention(
            torch.nn.Module(),
            *[torch.zeros(1, 1, 1, 4)] * 3,
            None,
            cu_seq_lens_q=torch.tensor([0, 1]),
            cu_seq_lens_k=torch.tensor([0, 1]),
            max_length_q=1,
            max_length_k=1,
            **{asked: 1.0},
        )


def test_a_kernel_that_refuses_the_backward_pass_is_found_before_the_first_step(build, caplog):
    policy = build()
    with attention_without_backward(), caplog.at_level(logging.INFO, logger="gleaner"):
        pack_models(Learner(policy, PolicyOptimizer(policy.parameters(), OptimizerConfig()), None))
    assert f"are padded: RuntimeError: {REFUSAL}" in caplog.text
    assert not is_packed(policy.module)
    assert all(parameter.grad is None for parameter in policy.parameters().values())


def test_responses_to_one_prompt_lie_together_in_packed_passes():
    lengths, prompts = [5, 9, 5, 5, 8, 6], [SharedPrompt(number, 3) for number in (0, 1, 2, 0, 1, 2)]
    assert passes(lengths, 20, packed=True, prompts=prompts) == [[1, 4, 5], [0, 2, 3]]
    assert passes(lengths, 22, packed=True, prompts=prompts) == [[1, 2, 4, 5], [0, 3]]
    assert passes(lengths, 22, packed=True) == [[1, 4], [0, 2, 3, 5]]
    assert dealt_passes(lengths, 22, 1, packed=True, prompts=prompts) == [[[1, 2, 4, 5], [0, 3]]]


def test_the_keys_that_a_pass_repeats_are_bounded_too():
    """A group of short answers to a long prompt has few tokens of its own, and its prompt's keys 64 times."""
    prompt, answer, number, limit = 4096, 100, 64, 16_384
    lengths, prompts = [prompt + answer] * number, [SharedPrompt(0, prompt - 1)] * number
    parts = passes(lengths, limit, packed=True, prompts=prompts)
    assert sorted(index for part in parts for index in part) == list(range(number))
    for part in parts:
        row = packed_row([lengths[index] for index in part], [prompt] * len(part), [0] * len(part))
        assert row.repeats is not None
        own, keys = len(row.places), int(row.key_bounds[-1])
        # The shared prompt's own keys are the second time of each.
        assert own + (keys - own - prompt) // REPEATED_PER_TOKEN <= limit


def test_a_packed_pass_counts_its_own_tokens_only():
    lengths = [9, 1, 1, 1, 8, 2]
    assert passes(lengths, 12, packed=True) == [[0], [1, 2, 4, 5], [3]]
    for part in passes(lengths, 12, packed=True):
        assert sum(lengths[index] for index in part) <= 12
    assert padded_tokens([9, 1, 1]) == 27
    assert passes([30, 1], 12, packed=True) == [[0], [1]]
    dealt = dealt_passes(lengths, 12, 2, packed=True)
    assert sorted(index for rank in dealt for part in rank for index in part) == list(range(6))
    assert len(dealt[0]) == len(dealt[1])
