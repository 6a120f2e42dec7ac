import pytest
import torch
from transformers import CohereConfig, CohereForCausalLM, GPT2Config, GPT2LMHeadModel

from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.policy import Policy, PolicyError
from tasks.learning.ranks import Ranks
from tests.tasks.learning.tiny_model import write_model


def full_logprobs(module, batch, temperature):
    """From one unpadded forward pass of the whole model per response."""
    rows = []
    for row in range(len(batch.responses)):
        prompt, length = batch.prompt_lengths[row], int(batch.lengths[row])
        ids = batch.input_ids[row, : prompt + length]
        logits = module(input_ids=ids[None]).logits[0, prompt - 1 : -1] / temperature
        rows.append(torch.log_softmax(logits, dim=-1).gather(1, ids[prompt:, None])[:, 0])
    return rows


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_logprobs_equal_a_full_forward_pass(build, batch, temperature):
    policy = build()
    logprobs, entropy = policy.logprobs(batch, temperature)
    assert logprobs.shape == entropy.shape == batch.completion_ids.shape
    for row, expected in enumerate(full_logprobs(policy.module, batch, temperature)):
        torch.testing.assert_close(logprobs[row, : len(expected)], expected, rtol=0, atol=1e-5)
        assert logprobs[row, len(expected) :].abs().sum() == 0
    assert (entropy[batch.response_mask] > 0).all()
    assert (entropy[~batch.response_mask] == 0).all()


def test_gradients_equal_a_full_forward_pass(build, batch):
    ours, theirs = build(double=True), build(double=True)
    (ours.logprobs(batch, 1.0)[0].sum(dim=1) ** 2).sum().backward()
    sum(row.sum() ** 2 for row in full_logprobs(theirs.module, batch, 1.0)).backward()
    for name, parameter in ours.parameters().items():
        torch.testing.assert_close(parameter.grad, theirs.parameters()[name].grad, rtol=1e-8, atol=1e-10)


def test_temperature_zero_counts_as_one(build, batch):
    policy = build()
    assert torch.equal(policy.logprobs(batch, 0.0)[0], policy.logprobs(batch, 1.0)[0])


def test_gradient_checkpointing_changes_nothing(build, batch):
    gradients = []
    for enabled in (False, True):
        policy = build(gradient_checkpointing=enabled)
        policy.logprobs(batch, 1.0)[0].sum().backward()
        gradients.append({name: p.grad for name, p in policy.parameters().items()})
        assert policy.module.is_gradient_checkpointing is enabled
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-6, atol=1e-7)


def test_two_identical_passes_are_bit_equal(build, batch):
    results = []
    for _ in range(2):
        policy = build()
        logprobs, _ = policy.logprobs(batch, 1.0)
        logprobs.sum().backward()
        results.append([logprobs.detach(), *(p.grad for p in policy.parameters().values())])
    assert all(torch.equal(one, other) for one, other in zip(*results, strict=True))


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters(build, batch):
    policy = build(dtype="bfloat16")
    logprobs, _ = policy.logprobs(batch, 1.0)
    torch.testing.assert_close(logprobs, build().logprobs(batch, 1.0)[0], rtol=0.1, atol=0.3)
    logprobs.sum().backward()
    assert {(p.dtype, p.grad.dtype) for p in policy.parameters().values()} == {(torch.float32, torch.float32)}


@pytest.mark.parametrize("tied", [True, False])
def test_tensors_round_trip_under_hugging_face_names(tmp_path, batch, tied):
    given = write_model(tmp_path, tied=tied)
    policy = Policy(tmp_path, given, TrainerConfig(device="cpu"))
    published = policy.tensors()
    assert set(published) == set(given) - ({"lm_head.weight"} if tied else set())
    assert all(torch.equal(value, given[name]) for name, value in published.items())
    again = Policy(tmp_path, published, TrainerConfig(device="cpu"))
    assert torch.equal(again.logprobs(batch, 1.0)[0], policy.logprobs(batch, 1.0)[0])
    assert {t.dtype for t in policy.tensors(torch.bfloat16).values()} == {torch.bfloat16}


@pytest.mark.slow
def test_a_tied_tensor_may_come_under_its_other_name(model, build):
    directory, tensors = model
    renamed = {("lm_head.weight" if "embed_tokens" in name else name): value for name, value in tensors.items()}
    assert len(renamed) == len(tensors) - 1
    policy = Policy(directory, renamed, TrainerConfig(device="cpu"))
    assert all(torch.equal(value, build().tensors()[name]) for name, value in policy.tensors().items())
    policy.load_tensors(tensors)
    with pytest.raises(PolicyError, match=r"'lm_head\.weight' differs from 'model\.embed_tokens\.weight', .*ties it"):
        policy.load_tensors(tensors | {"lm_head.weight": torch.zeros_like(tensors["lm_head.weight"])})
    assert torch.equal(policy.module.lm_head.weight, tensors["model.embed_tokens.weight"])


def test_refuses_tensors_of_another_model(model, build):
    directory, tensors = model
    bias = "model.layers.0.self_attn.q_proj.bias"
    for changed, message in [
        ({name: value for name, value in tensors.items() if name != bias}, f"missing {bias}; unknown none"),
        (tensors | {"model.extra": torch.zeros(1)}, "missing none; unknown model.extra"),
        (tensors | {bias: torch.zeros(3)}, rf"'{bias}' has shape \(3,\); allowed: \(32,\)"),
    ]:
        with pytest.raises(PolicyError, match=message):
            Policy(directory, changed, TrainerConfig(device="cpu"))
    policy = build()
    before = {name: value.clone() for name, value in policy.tensors().items()}
    with pytest.raises(PolicyError):
        policy.load_tensors({name: value + 1 for name, value in tensors.items()} | {bias: torch.zeros(3)})
    assert all(torch.equal(value, before[name]) for name, value in policy.tensors().items())


def test_refuses_a_missing_or_unknown_model_and_an_absent_gpu(tmp_path):
    with pytest.raises(PolicyError, match=r"holds no config\.json"):
        Policy(tmp_path / "nowhere", {}, TrainerConfig(device="cpu"))
    (tmp_path / "config.json").write_text('{"model_type": "abacus"}')
    with pytest.raises(PolicyError, match=r"config\.json' is not understood: .*abacus"):
        Policy(tmp_path, {}, TrainerConfig(device="cpu"))
    if not torch.cuda.is_available():
        with pytest.raises(PolicyError, match="device: value 'cuda'"):
            Policy(tmp_path, {}, TrainerConfig(device="cuda"))


def test_refuses_a_model_that_transforms_its_logits(tmp_path):
    config = CohereConfig(
        vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=2, logit_scale=0.25, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    config.save_pretrained(tmp_path)
    with pytest.raises(PolicyError, match="CohereForCausalLM transforms its logits"):
        Policy(tmp_path, CohereForCausalLM(config).state_dict(), TrainerConfig(device="cpu"))


def test_dropout_of_the_model_is_switched_off(tmp_path):
    config = GPT2Config(vocab_size=16, n_positions=16, n_embd=8, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=1)
    assert config.resid_pdrop > 0
    config.save_pretrained(tmp_path)
    policy = Policy(tmp_path, GPT2LMHeadModel(config).state_dict(), TrainerConfig(device="cpu"))
    batch = collate([0], [[2, 3]], [[4, 5, 6]], [[0.0] * 3])
    logprobs = [policy.logprobs(batch, 1.0)[0] for _ in range(2)]
    assert torch.equal(*logprobs)
    torch.testing.assert_close(logprobs[0][0], full_logprobs(policy.module.eval(), batch, 1.0)[0], rtol=0, atol=1e-5)


def test_a_reference_policy_holds_no_gradients(build, batch):
    assert not build(trainable=False).logprobs(batch, 1.0)[0].requires_grad


def test_only_the_first_rank_copies_published_tensors_to_its_host(model):
    """The device is one from which nothing can be copied."""
    first, second = (Policy(*model, TrainerConfig(device="cpu"), ranks=Ranks(rank=rank)) for rank in (0, 1))
    for policy in (first, second):
        policy.module.to("meta")
    published = dict(second.each_tensor())
    assert published.keys() == second.shapes().keys()
    assert all(tensor.is_meta for tensor in published.values())
    with pytest.raises(NotImplementedError, match="Cannot copy out of meta tensor"):
        next(first.each_tensor())
