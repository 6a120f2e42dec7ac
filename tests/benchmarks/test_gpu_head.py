"""The head's part of benchmarks.gpu: each way goes through the same loss, and a wait is counted."""

import copy

import pytest
import torch

from benchmarks.gpu import head
from benchmarks.gpu.other_rows import other_rows
from benchmarks.gpu.sizes import size_for
from benchmarks.gpu.waits import waits

SMALL = size_for("cpu", "0.5b", small=True)


@pytest.mark.slow
def test_each_figure_of_the_head_is_there_when_it_is_measured():
    found = [copy.deepcopy(figures) for figures in head.measure(SMALL)]
    (last,) = found[-1]["arms"]
    assert list(last["us_per_token"]) == [str(chunk) for chunk in SMALL.head_chunks]
    assert len(found) == len(SMALL.head_chunks) + len(last["ways"])
    measured = [name for name, figures in last["ways"].items() if "failed" not in figures]
    assert measured[:3] == ["once", "once, whole responses", "twice"]
    # With every logit at once there would be as much for each of three copies.
    whole = SMALL.head_tokens * SMALL.shape.vocab_size * 4
    assert all(0 < last["ways"][name]["peak_bytes"] < 3 * whole for name in measured)
    shown = [row["measure"] for row in other_rows({"head": found[-1]})]
    assert "head of 64, once, whole responses, peak MiB" in shown
    assert [len(list(other_rows({"head": figures}))) for figures in found] == sorted(
        len(list(other_rows({"head": figures}))) for figures in found
    )


@pytest.mark.slow
def test_all_ways_that_the_trainer_could_take_have_one_gradient():
    given = head._Given(SMALL, 64)
    gradients = []
    for name, way in given.ways(SMALL.head_chunks[0]).items():
        if not name.startswith("Liger"):
            given._states.grad = given._weight.grad = None
            way()
            gradients.append((given._states.grad, given._weight.grad))
    assert len(gradients) == 3
    for states, weight in gradients[1:]:
        torch.testing.assert_close(states, gradients[0][0], rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(weight, gradients[0][1], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_what_reads_a_value_or_a_size_is_counted_as_a_wait():
    values = torch.ones(4)
    assert waits(lambda: values * 2) == {}
    found = waits(lambda: [values.sum().item(), values.nonzero(), values[0].item()])
    assert found == {"aten::_local_scalar_dense": 2, "aten::nonzero": 1}
