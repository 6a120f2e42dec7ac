"""The part `trainer` of benchmarks.gpu: the responses that it trains on, and the memory that an arm leaves."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.gpu import trainer, trainer_trl
from benchmarks.gpu.sizes import size_for
from benchmarks.gpu.trainer import completion_lengths


@given(st.integers(2, 128), st.integers(1, 512), st.integers(16, 2048), st.sampled_from([0.0, 0.2, 0.4]))
def test_lengths_have_the_share_of_padding_that_is_asked_for(count, prompt, most, share):
    lengths = completion_lengths(count, prompt, most, share)
    assert len(lengths) == count
    assert max(lengths) == most
    assert min(lengths) >= 1
    padding = 1 - (count * prompt + sum(lengths)) / (count * (prompt + most))
    # A long prompt bounds the share that can be had, and one response of the most tokens is always there.
    most_possible = (most - 1) * (count - 1) / (count * (prompt + most))
    assert abs(padding - min(share, most_possible)) <= 1 / (prompt + most) + 1e-9


@pytest.mark.parametrize("fits", [True, False])
def test_an_arm_gives_its_memory_back_before_the_other_trainer_runs(monkeypatch, tmp_path, fits):
    """Both processes have the same device, and torch keeps freed memory for its own process."""
    told = []
    size = replace(size_for("cpu", "0.5b", small=True), device="cuda")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: told.append("memory is given back"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: 1)

    def step(*_, **__):
        told.append("step")
        if not fits:
            raise torch.OutOfMemoryError("too much")
        return {"step_s": 1.0}

    monkeypatch.setattr(trainer._Given, "_steps", step)
    monkeypatch.setattr(trainer_trl, "_step_s", lambda *_, **__: step()["step_s"])
    monkeypatch.setattr(trainer_trl, "Work", lambda **given: given)
    ours = trainer._Given(size, tmp_path, {}, [1]).measured(liger=False, packed=False)
    theirs = trainer_trl._measured({}, [1], on_gpu=True, settings={})
    assert told == 2 * ["step", "memory is given back"]
    assert all(("out_of_memory" in arm) != fits for arm in (ours, theirs))
