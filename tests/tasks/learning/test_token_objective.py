from itertools import accumulate, pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.live_bytes import LiveBytes
from tasks.learning.token_logprobs import (
    CACHED_LOGITS,
    CPU_ROWS_MIN,
    GPU_LOGITS_MAX,
    LOGIT_BYTES,
    LOGITS_PER_CHUNK,
    chunk_rows,
    gpu_logits,
    token_logprobs,
)
from tasks.learning.token_objective import token_objective
from tests.tasks.learning.test_token_logprobs import case


def loss_of(old, advantages):
    """PPO's clipped surrogate of some tokens: clipped ones have no gradient."""

    def loss(logprobs, rows):
        ratio = (logprobs - old[rows]).exp()
        return -torch.minimum(ratio * advantages[rows], ratio.clamp(0.8, 1.28) * advantages[rows])

    return loss


def surrogate(dtype=torch.float64, **sizes):
    hidden, weight, bias, targets = case(dtype, **sizes)
    generator = torch.Generator().manual_seed(3)
    plain = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=-1).gather(1, targets[:, None])[:, 0]
    old = plain.detach() + 0.3 * torch.randn(len(targets), generator=generator, dtype=dtype)
    return (hidden, weight, bias, targets), loss_of(old, torch.randn(len(targets), generator=generator, dtype=dtype))


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("logits_per_chunk", [1, 9 * 4, None])
def test_value_and_gradients_equal_those_of_the_loss_of_plain_logprobs(with_bias, logits_per_chunk):
    (hidden, weight, bias, targets), loss = surrogate()
    inputs = [hidden, weight, bias] if with_bias else [hidden, weight]
    logits = (hidden @ weight.T + (bias if with_bias else 0)) / 0.7
    plain = torch.log_softmax(logits, dim=-1)
    expected = plain.gather(1, targets[:, None])[:, 0]
    expected_sum = loss(expected, slice(None)).sum()
    expected_gradients = torch.autograd.grad(3 * expected_sum, inputs)

    objective, logprobs, entropy = token_objective(
        hidden, weight, bias if with_bias else None, targets, loss, temperature=0.7, logits_per_chunk=logits_per_chunk
    )
    gradients = torch.autograd.grad(3 * objective, inputs)
    assert not logprobs.requires_grad
    assert not entropy.requires_grad
    torch.testing.assert_close(objective, expected_sum, rtol=0, atol=1e-12)
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(entropy, torch.distributions.Categorical(logits=plain).entropy(), rtol=0, atol=1e-13)
    for ours, theirs in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


LENGTHS = [0, 3, 1, 0, 4, 2, 1, 0]


def of_stretches(lengths, factors):
    """A loss in which the tokens of a stretch depend on each other; fails for a part of a stretch."""
    bounds = [0, *accumulate(lengths)]

    def loss(logprobs, rows):
        assert {rows.start, rows.stop} <= set(bounds)
        values = torch.empty_like(logprobs)
        for start, end in pairwise(bounds):
            if rows.start <= start < end <= rows.stop:
                here = logprobs[start - rows.start : end - rows.start]
                values[start - rows.start : end - rows.start] = here.detach().mean().exp() * here * factors[start:end]
        return values

    return loss


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 100])
@pytest.mark.parametrize("lengths", [LENGTHS, [11], [1] * 11, [5, 6]])
def test_stretches_that_depend_on_each_other_are_never_divided(rows, lengths):
    (hidden, weight, bias, targets), _ = surrogate()
    loss = of_stretches(lengths, torch.linspace(-1, 1, 11, dtype=torch.float64))
    plain = torch.log_softmax((hidden @ weight.T + bias) / 0.7, dim=-1).gather(1, targets[:, None])[:, 0]
    expected = loss(plain, slice(0, 11)).sum()
    gradients = torch.autograd.grad(expected, [hidden, weight, bias])
    chunk = {"temperature": 0.7, "logits_per_chunk": rows * len(weight)}
    found = token_objective(hidden, weight, bias, targets, loss, together=lengths, **chunk)
    torch.testing.assert_close(found[0], expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(found[1], plain, rtol=0, atol=1e-13)
    for ours, theirs in zip(torch.autograd.grad(found[0], [hidden, weight, bias]), gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("rows", "together", "products"),
    [(1, (), 2), (11, (), 2), (4, LENGTHS, 2), (2, LENGTHS, 2 + 4 / 11), (5, [11], 2 + 10 / 11)],
    ids=["chunks", "one chunk", "stretches within chunks", "two longer ones", "a single one"],
)
def test_logits_are_computed_once_where_a_chunk_has_all_that_depends_on_each_other(rows, together, products):
    """Of a longer stretch, all but those of the last chunk are computed twice. The head is frozen: two products."""
    hidden, weight, _, targets = case(torch.float64)
    weight = weight.detach()
    with FlopCounterMode(display=False) as counter:
        token_objective(
            hidden, weight, None, targets, lambda logprobs, _: -logprobs,
            together=together, logits_per_chunk=rows * len(weight),
        )[0].backward()  # fmt: skip
    assert counter.get_total_flops() == pytest.approx(products * 2 * hidden.numel() * len(weight))
    with FlopCounterMode(display=False) as counter:
        token_logprobs(hidden, weight, None, targets)[0].sum().backward()
    assert counter.get_total_flops() == 3 * 2 * hidden.numel() * len(weight)


@pytest.mark.parametrize("together", [(), [64] * 8], ids=["by token", "by response"])
def test_memory_is_that_of_a_chunk_however_many_tokens_there_are(together):
    hidden, weight, _, targets = case(torch.float32, tokens=512, vocabulary=2000, hidden_size=16)
    held = (hidden.numel() + weight.numel()) * 4
    for rows in (32, 64, 128):
        with LiveBytes() as memory:
            token_objective(
                hidden, weight, None, targets, lambda logprobs, _: -logprobs,
                together=together, logits_per_chunk=rows * 2000,
            )[0].backward()  # fmt: skip
        # Besides a chunk: gradients, their copy that has the usual order of elements, a few numbers for each token.
        assert 8 * rows * 2000 < memory.peak < 3 * held + LOGIT_BYTES * rows * 2000


@pytest.mark.parametrize(("vocabulary", "tokens"), [(9, 11), (700, 600)])
def test_float32_gradients_are_near_those_in_float64(vocabulary, tokens):
    """Also where oneDNN multiplies: the larger size is above FLOPS_MIN."""
    sizes = {"vocabulary": vocabulary, "tokens": tokens, "hidden_size": 32}
    (*exact, targets), _ = surrogate(**sizes)
    single = [each.detach().float().requires_grad_() for each in exact]
    advantages = torch.linspace(-1, 1, tokens)

    def loss(logprobs, rows):
        return -advantages[rows] * logprobs

    token_objective(*exact[:2], None, targets, loss)[0].backward()
    token_objective(*single[:2], None, targets, loss)[0].backward()
    for ours, theirs in zip(single[:2], exact[:2], strict=True):
        assert float((ours.grad - theirs.grad).norm() / theirs.grad.norm()) < 1e-6


def test_logprobs_and_entropies_are_bit_equal_to_those_without_a_loss():
    hidden, weight, _, targets = case(torch.float32, tokens=300, hidden_size=32, vocabulary=900)
    plain = token_logprobs(hidden, weight, None, targets)
    with_loss = token_objective(hidden, weight, None, targets, lambda logprobs, _: logprobs)[1:]
    assert all(torch.equal(*pair) for pair in zip(plain, with_loss, strict=True))


def test_a_frozen_head_has_no_gradient_and_hidden_states_have_the_same():
    (hidden, weight, bias, targets), loss = surrogate()
    whole = torch.autograd.grad(token_objective(hidden, weight, bias, targets, loss)[0], [hidden, weight])
    frozen = token_objective(hidden, weight.detach(), bias.detach(), targets, loss)[0]
    assert torch.equal(torch.autograd.grad(frozen, hidden)[0], whole[0])
    only_head = token_objective(hidden.detach(), weight, None, targets, loss)[0]
    assert torch.autograd.grad(only_head, weight)[0].shape == weight.shape


def test_the_gradient_is_taken_once():
    (hidden, weight, _, targets), loss = surrogate()
    objective, _, _ = token_objective(hidden, weight, None, targets, loss)
    objective.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="taken already"):
        objective.backward()


def test_half_precision_products_keep_a_float32_loss_and_weight_gradient():
    hidden, weight, _, targets = case(torch.float32)
    half = hidden.detach().bfloat16().requires_grad_()
    objective, logprobs, _ = token_objective(half, weight, None, targets, lambda each, _: -each, logits_per_chunk=18)
    objective.backward()
    assert (objective.dtype, logprobs.dtype) == (torch.float32, torch.float32)
    assert (half.grad.dtype, weight.grad.dtype) == (torch.bfloat16, torch.float32)
    plain = torch.log_softmax(hidden @ weight.T, dim=-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(objective, -plain.sum(), rtol=0.05, atol=0.1)


@pytest.mark.parametrize(
    ("vocabulary", "rows"),
    [
        (512, CACHED_LOGITS // 512),
        (32_768, CPU_ROWS_MIN),
        (LOGITS_PER_CHUNK // 4, 4),
        (2 * LOGITS_PER_CHUNK, 1),
    ],
)
def test_rows_of_a_chunk_on_a_cpu(vocabulary, rows):
    assert chunk_rows(torch.empty(vocabulary, 1, device="meta"), 10 * vocabulary) == 10
    assert chunk_rows(torch.empty(1).expand(vocabulary, 1), None) == rows


@pytest.mark.parametrize(
    ("gigabytes", "logits"), [(8, LOGITS_PER_CHUNK), (24, 1 << 25), (40, 1 << 26), (80, 1 << 27), (141, GPU_LOGITS_MAX)]
)
def test_a_chunk_on_a_gpu_grows_with_its_memory_and_takes_a_small_share_of_it(gigabytes, logits):
    assert gpu_logits(int(gigabytes * 1e9)) == logits
    assert logits * 16 <= gigabytes * 1e9 / 16
