"""The fused kernel against the passes of keyed_noise.py: on a GPU where there is one, else in Triton's interpreter.

The interpreter must be chosen before anybody imports Triton, and some model libraries do. So without a GPU these tests
run in a child process, and the kernels are compiled for one that is not there: the compiler refuses what the
interpreter takes.
"""

import logging
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from tasks.sampling.engines import keyed_noise
from tasks.sampling.engines.keyed_noise import gumbel, sample

triton = pytest.importorskip("triton", reason="Triton is not installed; it comes with torch's builds for GPUs")
import triton.language as tl  # noqa: E402 - after it is known to be there

from tasks.sampling.engines import keyed_noise_triton  # noqa: E402
from tasks.sampling.engines.keyed_noise_triton import DTYPES, _gumbel_of_words, checked_draw, draw  # noqa: E402

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda", 0) if ON_GPU else torch.device("cpu")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
runs_kernels = pytest.mark.skipif(not (ON_GPU or INTERPRETED), reason="runs in the child process of another test")
# Two scores closer than this may change places; see the module's docstring.
GAP = 1e-5
MASK = (1 << 64) - 1


def random_rows(rows, seed):
    """Keys of all 64 bits, positions up to a million, and temperatures of which every fifth is 0."""
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randint(-(1 << 63), (1 << 63) - 1, (rows,), generator=generator)
    positions = torch.randint(0, 1_000_000, (rows,), generator=generator)
    temperature = 0.05 + 1.5 * torch.rand(rows, generator=generator)
    temperature[::5] = 0.0
    return keys.to(DEVICE), positions.to(DEVICE), temperature.to(DEVICE)


def random_logits(rows, vocab_size, dtype, seed):
    return (5 * torch.randn(rows, vocab_size, generator=torch.Generator().manual_seed(seed))).to(DEVICE, dtype)


def in_passes(logits, keys, positions, temperature):
    ones = torch.ones_like(temperature)
    return sample(logits, keys, positions, temperature, ones, torch.zeros_like(keys))


def assert_drawn_as_in_passes(logits, keys, positions, temperature):
    token_ids, logprobs, _ = draw(logits, keys, positions, temperature)
    assert (token_ids.dtype, logprobs.dtype) == (torch.int64, torch.float32)
    greedy = temperature == 0
    scaled = logits.float() / torch.where(greedy, 1.0, temperature).unsqueeze(1)
    exact = torch.log_softmax(scaled.double(), dim=-1)
    best = (exact + gumbel(keys, positions, logits.shape[1])).topk(2).values
    clear = greedy | (best[:, 0] - best[:, 1] > GAP)
    assert clear.sum() >= 0.9 * len(clear)
    wanted_ids, wanted_logprobs = in_passes(logits, keys, positions, temperature)
    assert torch.equal(token_ids[clear], wanted_ids[clear])
    # torch's own sum over a large vocabulary is the less exact one on a CPU
    torch.testing.assert_close(logprobs[clear], wanted_logprobs[clear], rtol=0, atol=3e-5)
    wanted_logprobs = exact.gather(1, token_ids.unsqueeze(1)).squeeze(1).float()
    torch.testing.assert_close(logprobs, wanted_logprobs, rtol=2e-7, atol=2e-6)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("vocab_size", "rows"), [(96, 100), (512, 100), (1000, 100), (32_768 + 17, 20), (151_936, 8)])
def test_tokens_and_logprobs_are_those_of_the_passes(vocab_size, rows, dtype):
    logits = random_logits(rows, vocab_size, dtype, seed=vocab_size)
    assert_drawn_as_in_passes(logits, *random_rows(rows, seed=vocab_size + 1))


@runs_kernels
def test_noise_far_into_the_winning_tail():
    """The winner of many equal tokens has large noise."""
    rows, vocab_size = 10, 100_000
    keys, positions, _ = random_rows(rows, seed=3)
    temperature = torch.ones(rows, device=DEVICE)
    token_ids, _, scores = draw(torch.zeros(rows, vocab_size, device=DEVICE), keys, positions, temperature)
    noise = gumbel(keys, positions, vocab_size)
    assert torch.equal(token_ids, noise.argmax(dim=-1))
    torch.testing.assert_close(scores + math.log(vocab_size), noise.amax(dim=-1), rtol=0, atol=1e-5)
    assert scores.max() + math.log(vocab_size) > 10


@triton.jit
def noise_of_words(words, noise, block: tl.constexpr):
    cells = tl.arange(0, block)
    tl.store(noise + cells, _gumbel_of_words(tl.load(words + cells).to(tl.uint64)))


@runs_kernels
def test_noise_is_accurate_for_words_of_every_size():
    powers = [word for power in range(64) for word in (1 << power, (1 << power) - 1, MASK - (1 << power))]
    powers += [(0x9E3779B97F4A7C15 * i) & MASK for i in range(1, 1024 - len(powers))] + [MASK]
    words = torch.from_numpy(np.array(powers, dtype=np.uint64).view(np.int64)).to(DEVICE)
    noise = torch.empty(1024, device=DEVICE)
    noise_of_words[(1,)](words, noise, block=1024)
    v = [min(float(np.float32(word >> 1)) * 2.0**-63 + 2.0**-64, 1 - 2.0**-24) for word in powers]
    # as float32 holds it, to which all after it is relative
    wanted = [-math.log(-math.log1p(-float(np.float32(x)))) for x in v]
    assert noise.tolist() == pytest.approx(wanted, rel=1.3e-7, abs=4e-7)


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_ties_go_to_the_smaller_id(dtype):
    logits = torch.full((3, 5000), -1.0, device=DEVICE, dtype=dtype)
    logits[0, [4999, 2048, 2047]] = 1.0
    logits[1, [4999, 4500]] = 1.0
    rows = torch.arange(3, device=DEVICE)
    token_ids, _, scores = draw(logits, rows, rows, torch.zeros(3, device=DEVICE))
    assert token_ids.tolist() == [2047, 4500, 0]
    assert scores.tolist() == [1.0, 1.0, -1.0]


# the interpreter's numpy warns of infinities and NaNs
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@runs_kernels
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_no_distribution_get_nan_and_leave_the_others_alone(temperature):
    logits = torch.zeros(6, 5000, device=DEVICE)
    logits[1, 4321] = math.nan
    logits[2] = math.nan
    logits[3, 3000] = math.inf
    logits[4] = -math.inf
    logits[5] = -math.inf
    logits[5, 4999] = -7.0
    rows = torch.arange(6, device=DEVICE)
    token_ids, logprobs, _ = draw(logits, rows, rows, torch.full((6,), temperature, device=DEVICE))
    assert logprobs.isnan().tolist() == [False, True, True, True, True, False]
    assert token_ids[1:].tolist() == [0, 0, 0, 0, 4999]
    assert logprobs[0].item() == pytest.approx(-math.log(5000), abs=1e-5)
    assert logprobs[5].item() == 0.0


@runs_kernels
@pytest.mark.parametrize("layout", ["every other row", "columns cut off", "transposed", "one row for all"])
def test_any_layout_of_the_logits_will_do(layout):
    wide = random_logits(20, 3000, torch.float32, seed=11)
    logits = {
        "every other row": wide[::2],
        "columns cut off": wide[:10, 7:2500],
        "transposed": wide[:10].t().contiguous().t(),
        "one row for all": wide[0].expand(10, -1),
    }[layout]
    keys, positions, temperature = random_rows(20, seed=12)
    assert_drawn_as_in_passes(logits, keys[::2], positions[::2], temperature[::2])
    assert_drawn_as_in_passes(logits, keys[:10], positions[:10], temperature[1].expand(10))


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_check_passes_and_is_what_sampling_asks(dtype):
    assert checked_draw(gumbel, DEVICE, dtype) is draw
    assert keyed_noise._fused_draw(DEVICE, dtype) is draw


@runs_kernels
def test_the_check_refuses_other_noise_and_says_so_once(caplog):
    def other_noise(keys, positions, vocab_size):
        return gumbel(keys, positions + 1, vocab_size)

    with caplog.at_level(logging.WARNING, logger=keyed_noise_triton.__name__):
        assert checked_draw(other_noise, DEVICE, torch.float32) is None
    assert ["noise differs by" in message for message in caplog.messages] == [True]


@runs_kernels
def test_the_check_refuses_noise_that_differs_for_unlikely_words_only():
    def cut_off(keys, positions, vocab_size):
        return gumbel(keys, positions, vocab_size).clamp_(max=5.0)

    assert checked_draw(cut_off, DEVICE, torch.bfloat16) is None


def test_other_dtypes_are_not_fused(caplog):
    assert checked_draw(gumbel, DEVICE, torch.float64) is None
    assert caplog.messages == []


@pytest.mark.skipif(not ON_GPU, reason="needs a GPU")
def test_sampling_on_a_gpu_uses_the_kernel():
    logits = random_logits(40, 5000, torch.bfloat16, seed=21)
    keys, positions, temperature = random_rows(40, seed=22)
    ones, zeros = torch.ones_like(temperature), torch.zeros_like(keys)
    found = sample(logits, keys, positions, temperature, ones, zeros, truncated=False)
    assert torch.equal(found[1], draw(logits, keys, positions, temperature)[1])
    assert torch.equal(found[0], in_passes(logits, keys, positions, temperature)[0])


@pytest.mark.skipif(ON_GPU or INTERPRETED, reason="the kernels run in this process")
def test_the_kernels_in_tritons_interpreter():
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", str(Path(__file__))]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    child = subprocess.run(
        command,
        env=environment | {"TRITON_INTERPRET": "1"},
        cwd=Path(__file__).parents[4],
        capture_output=True,
        text=True,
        check=False,
    )
    assert child.returncode == 0, child.stdout + child.stderr


LOGITS = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16"}
KERNELS = {
    "_reduce_blocks": {
        "keys": "*i64",
        "positions": "*i64",
        "best_ids": "*i32",
        "vocab_size": "i32",
        "row_stride": "i32",
    },
    "_combine_blocks": {"best_ids": "*i32", "token_ids": "*i64", "blocks": "i32", "row_stride": "i32"},
}


@pytest.mark.skipif(INTERPRETED, reason="the interpreter replaces the compiler")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("kernel", "constants"), [("_reduce_blocks", {"block": 2048}), ("_combine_blocks", {"width": 1})]
)
def test_the_compiler_takes_the_kernels(tmp_path, monkeypatch, kernel, constants, dtype):
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415 - not where Triton is missing
    from triton.compiler import ASTSource, compile  # noqa: A004, PLC0415

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    function = getattr(keyed_noise_triton, kernel)
    types = dict.fromkeys(function.arg_names, "*fp32") | {"logits": LOGITS[dtype]} | KERNELS[kernel]
    types |= dict.fromkeys(constants, "constexpr")
    compiled = compile(ASTSource(function, types, constants), target=GPUTarget("cuda", 90, 32))
    # approximations of the hardware would make other noise
    assert "lg2.approx" not in compiled.asm["ptx"]
    assert "div.rn.f32" in compiled.asm["ptx"]
