import pytest
import torch

from tasks.learning.token_logprobs import token_logprobs


def case(dtype=torch.float64, tokens=11, hidden_size=6, vocabulary=9):
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(tokens, hidden_size, generator=generator, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, hidden_size, generator=generator, dtype=dtype, requires_grad=True)
    bias = torch.randn(vocabulary, generator=generator, dtype=dtype, requires_grad=True)
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    return hidden, weight, bias, targets


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("logits_per_chunk", [1, 9 * 4, 10**6])
def test_values_and_gradients_equal_a_plain_log_softmax(temperature, with_bias, logits_per_chunk):
    hidden, weight, bias, targets = case()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    upstream = torch.randn(len(targets), dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    logits = hidden @ weight.T + (bias if with_bias else 0)
    plain = torch.log_softmax(logits / temperature, dim=-1)
    expected = plain.gather(1, targets[:, None])[:, 0]
    expected_gradients = torch.autograd.grad((expected * upstream).sum(), inputs)

    logprobs, entropy = token_logprobs(
        hidden, weight, bias if with_bias else None, targets,
        temperature=temperature, logits_per_chunk=logits_per_chunk,
    )  # fmt: skip
    gradients = torch.autograd.grad((logprobs * upstream).sum(), inputs)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=plain).entropy(), rtol=0, atol=1e-13)
    assert not entropy.requires_grad
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_gradient_by_finite_differences():
    hidden, weight, bias, targets = case(tokens=3)
    assert torch.autograd.gradcheck(
        lambda *inputs: token_logprobs(*inputs, targets, temperature=1.3, logits_per_chunk=18)[0],
        (hidden, weight, bias),
    )


def test_half_precision_products_keep_a_float32_softmax_and_weight_gradient():
    hidden, weight, _, targets = case(torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    logprobs, _ = token_logprobs(half, weight, None, targets, logits_per_chunk=18)
    logprobs.sum().backward()
    assert (logprobs.dtype, half.grad.dtype, weight.grad.dtype) == (torch.float32, torch.bfloat16, torch.float32)
    expected = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0.05, atol=0.1)
