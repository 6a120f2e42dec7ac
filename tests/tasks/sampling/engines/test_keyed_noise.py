import math
from importlib.util import find_spec

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from storage.journal.noise_keys import mix64, noise_key
from tasks.sampling.engines.keyed_noise import _fused_draw, gumbel, sample, signed64

GAMMA = 0x9E3779B97F4A7C15
MASK = (1 << 64) - 1
N = 40_000
# gumbel() of noise_key(1, 2, 3) at position 0 and of key 0 at position 12345, tokens 0, 1, 99, 151935
GOLDEN = (
    [3.8304922580718994, 2.890023946762085, 0.5240429639816284, 0.505669116973877],
    [-0.015581299550831318, 0.038487620651721954, 0.9367618560791016, 1.7665936946868896],
)
# chi-square quantiles at 1 - 1e-6: with fixed keys a test passes always or never
CHI2_15, CHI2_63 = 57.0, 130.0


def by_the_book(key: int, position: int, token: int) -> float:
    """The documented formula, one number at a time."""
    row = mix64((key + (position + 1) * GAMMA) & MASK)
    word = mix64((row + (token + 1) * GAMMA) & MASK)
    v = min((word >> 1) * 2.0**-63 + 2.0**-64, 1 - 2.0**-24)
    return -math.log(-math.log1p(-v))


def rounding(noise: float) -> float:
    """How far noise may be off because `v` is a float32: 2^-25 of v near 1, where the losing tokens are."""
    exponential = math.exp(-noise)
    return 2.0**-25 * math.exp(exponential) / exponential


def draw(logits, *, temperature=1.0, top_p=1.0, top_k=0, rows=N, key=7):
    keys = torch.full((rows,), signed64(key))
    return sample(
        logits.expand(rows, -1),
        keys,
        torch.arange(rows),
        torch.full((rows,), temperature),
        torch.full((rows,), top_p),
        torch.full((rows,), top_k),
    )


def chi2(counts, probs):
    expected = np.asarray(probs) * np.sum(counts)
    return float(((np.asarray(counts) - expected) ** 2 / expected).sum())


@given(key=st.integers(0, MASK), position=st.integers(0, 1 << 40), vocab_size=st.integers(1, 50))
def test_noise_is_the_documented_function(key, position, vocab_size):
    found = gumbel(torch.tensor([signed64(key)]), torch.tensor([position]), vocab_size)
    wanted = [by_the_book(key, position, token) for token in range(vocab_size)]
    assert found[0].tolist() == [pytest.approx(each, rel=1e-5, abs=3e-6 + rounding(each)) for each in wanted]


def test_noise_never_changes():
    keys = torch.tensor([signed64(noise_key(1, 2, 3)), 0])
    found = gumbel(keys, torch.tensor([0, 12345]), 151_936)[:, [0, 1, 99, 151_935]]
    assert found.tolist() == [pytest.approx(row, abs=2e-6) for row in GOLDEN]


def test_noise_does_not_depend_on_how_rows_are_blocked():
    keys = torch.arange(300) * 977
    whole = gumbel(keys, keys + 1, 1000)
    assert torch.equal(whole[200:203], gumbel(keys[200:203], keys[200:203] + 1, 1000))
    assert torch.equal(whole[:, :500], gumbel(keys, keys + 1, 500))


@pytest.mark.slow
def test_noise_has_the_gumbel_distribution_far_into_the_winning_tail():
    noise = gumbel(torch.arange(50), torch.zeros(50, dtype=torch.int64), 100_000).flatten().double()
    exponential = torch.exp(-noise)
    assert torch.isfinite(noise).all()
    assert exponential.mean().item() == pytest.approx(1.0, abs=0.003)
    # uniform in 64 cells, and again among the thousandth that is smallest
    for scale, rows in ((1.0, -torch.expm1(-exponential)), (1e-3, -torch.expm1(-exponential))):
        inside = rows[rows < scale] / scale
        assert chi2(torch.histc(inside, 64, 0, 1).numpy(), [1 / 64] * 64) < CHI2_63


@pytest.mark.parametrize("axis", ["keys", "positions", "tokens", "responses"])
def test_neighbours_are_independent(axis):
    ramp = torch.arange(30_001)
    if axis == "keys":
        noise = gumbel(ramp, torch.zeros_like(ramp), 1)[:, 0]
    elif axis == "positions":
        noise = gumbel(torch.zeros_like(ramp), ramp, 1)[:, 0]
    elif axis == "tokens":
        noise = gumbel(torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64), 30_001)[0]
    else:
        keys = torch.tensor([signed64(noise_key(0, 0, r)) for r in range(30_001)])
        noise = gumbel(keys, torch.zeros_like(ramp), 1)[:, 0]
    uniform = torch.exp(-torch.exp(-noise)).double()
    cells = (uniform[:-1] * 4).long() * 4 + (uniform[1:] * 4).long()
    assert chi2(torch.bincount(cells, minlength=16).numpy(), [1 / 16] * 16) < CHI2_15


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_tokens_follow_the_softmax(temperature):
    logits = torch.linspace(-3, 1, 16)
    token_ids, logprobs = draw(logits, temperature=temperature)
    wanted = torch.log_softmax(logits / temperature, -1)
    assert chi2(torch.bincount(token_ids, minlength=16).numpy(), wanted.exp().numpy()) < CHI2_15
    torch.testing.assert_close(logprobs, wanted[token_ids])


@pytest.mark.slow
def test_rare_tokens_are_as_rare_as_they_should_be():
    logits = torch.full((1000,), math.log(1e-6))
    logits[17] = math.log(1 - 999e-6)
    token_ids, _ = draw(logits, rows=100_000)
    assert 60 <= int((token_ids != 17).sum()) <= 145  # Poisson of mean 99.9


def test_top_k_keeps_the_k_most_probable_and_renormalises():
    logits = torch.linspace(2, -1, 16)
    token_ids, logprobs = draw(logits, top_k=5)
    counts = torch.bincount(token_ids, minlength=16)
    assert counts[5:].sum() == 0
    assert chi2(counts[:5].numpy(), torch.softmax(logits[:5], -1).numpy()) < CHI2_15
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1)[token_ids])


def test_top_p_keeps_the_shortest_run_that_reaches_it():
    logits = torch.tensor([0.1, 0.4, 0.2, 0.3]).log()
    for top_p, support in ((0.39, {1}), (0.41, {1, 3}), (0.69, {1, 3}), (0.71, {1, 3, 2}), (0.95, {0, 1, 2, 3})):
        assert set(draw(logits, top_p=top_p, rows=2000)[0].tolist()) == support


def test_top_p_counts_what_top_k_left():
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert set(draw(logits, top_p=0.5, top_k=2, rows=2000)[0].tolist()) == {0}
    assert set(draw(logits, top_p=0.5, rows=2000)[0].tolist()) == {0, 1}


class Sorts(TorchDispatchMode):
    """Notes how many elements each call of torch sorts."""

    def __init__(self):
        super().__init__()
        self.elements = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "sort" in func.name() or "topk" in func.name():
            self.elements.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_large_batch_is_sorted_a_few_rows_at_a_time_and_draws_the_same():
    rows, vocab_size = 48, 1 << 17
    logits = torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(0))
    settings = (torch.arange(rows), torch.arange(rows), torch.ones(rows), torch.full((rows,), 0.9), torch.zeros(rows))
    with Sorts() as sorts:
        tokens, logprobs = sample(logits, *settings)
    assert max(sorts.elements) <= 1 << 22
    assert sum(sorts.elements) >= rows * vocab_size
    alone = [sample(logits[row : row + 1], *(each[row : row + 1] for each in settings)) for row in (0, 31, 32, 47)]
    assert [int(token) for token, _ in alone] == tokens[[0, 31, 32, 47]].tolist()
    assert torch.allclose(torch.cat([each for _, each in alone]), logprobs[[0, 31, 32, 47]])


def test_ties_keep_the_smaller_ids():
    assert set(draw(torch.zeros(8), top_k=3, rows=2000)[0].tolist()) == {0, 1, 2}


def test_greedy_takes_the_maximum_with_its_logprob_at_temperature_1():
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(0))
    rows = torch.arange(50)
    token_ids, logprobs = sample(logits, rows, rows, torch.zeros(50), torch.ones(50), torch.zeros(50).long())
    assert torch.equal(token_ids, logits.argmax(-1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, -1).amax(-1))


def test_rows_with_different_settings_do_not_disturb_each_other():
    logits = torch.randn(4, 64, generator=torch.Generator().manual_seed(1))
    keys, positions = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 3, 3, 9])
    settings_ = torch.tensor([1.0, 0.0, 0.7, 1.5]), torch.tensor([1.0, 1.0, 0.5, 1.0]), torch.tensor([0, 0, 0, 3])
    together = sample(logits, keys, positions, *settings_)
    for row in range(4):
        one = slice(row, row + 1)
        alone = sample(logits[one], keys[one], positions[one], *(setting[one] for setting in settings_))
        assert alone[0].item() == together[0][row].item()
        assert alone[1].item() == pytest.approx(together[1][row].item(), abs=1e-6)


def test_half_precision_logits_and_one_token_vocabularies():
    token_ids, logprobs = draw(torch.zeros(1, dtype=torch.bfloat16), top_k=1, rows=3)
    assert token_ids.tolist() == [0, 0, 0]
    assert logprobs.tolist() == [0.0, 0.0, 0.0]
    assert logprobs.dtype == torch.float32


@pytest.mark.skipif(find_spec("triton") is not None, reason="Triton is installed")
def test_nothing_is_fused_without_triton():
    assert _fused_draw(torch.device("cuda", 0), torch.float32) is None
