import logging

import pytest
import torch

from tasks.configuration.rollout import DRAFTS_MAX
from tasks.sampling.engines.batch import Batch
from tasks.sampling.engines.step_graphs import StepGraphs
from tests.recorded_steps import Recorder


def batch_of(count, *, truncated=False, greedy=False, token=1):
    names = ("token_ids", "cached", "positions", "keys", "served", "top_k")
    integers = {name: torch.full((count,), token if name == "token_ids" else 1) for name in names}
    floats = {name: torch.ones(count) for name in ("temperature", "top_p")}
    drafts = torch.zeros(count, DRAFTS_MAX, dtype=torch.int64)
    return Batch(**integers, **floats, drafts=drafts, truncated=truncated, greedy=greedy)


def step_of(batch):
    def step():
        batch.advance(batch.token_ids * 2)
        return torch.stack((batch.token_ids.double(), batch.positions.double()))

    return step


def run(graphs, batch, capacity=512):
    return graphs.run(batch, capacity, step_of(batch)).tolist()


def test_sizes_are_few_fill_up_little_and_hold_all_rows():
    graphs = StepGraphs(500, Recorder())
    sizes = [graphs.size(count) for count in range(1, 501)]
    assert all(count <= size <= max(count + 1, 1.25 * count) for count, size in enumerate(sizes, 1))
    assert sizes == sorted(sizes)
    assert sizes[-1] == 500
    assert len(set(sizes)) <= 32
    assert sizes[:9] == [1, 2, 3, 4, 5, 6, 7, 8, 10]


def test_the_first_step_of_a_size_is_run_and_the_next_are_recorded_once():
    recorder = Recorder()
    graphs = StepGraphs(4, recorder)
    batch = graphs.placed(batch_of(2))
    assert [run(graphs, batch) for _ in range(4)] == [[[2**n] * 2, [1 + n] * 2] for n in range(1, 5)]
    assert (recorder.recorded, recorder.launched) == (1, 3)
    for other in (batch_of(3), batch_of(2, truncated=True), batch_of(2, greedy=True)):
        placed = graphs.placed(other)
        assert [run(graphs, placed)[0][0] for _ in range(3)] == [2, 4, 8]
    assert (recorder.recorded, recorder.launched) == (4, 9)
    again = graphs.placed(batch_of(2, token=5))
    assert run(graphs, again) == [[10, 10], [2, 2]]
    assert (recorder.recorded, recorder.launched) == (4, 10)


def test_recordings_share_a_pool_and_go_with_it_when_the_cache_grows():
    recorder = Recorder()
    graphs = StepGraphs(4, recorder)
    for capacity in (512, 1024):
        for count in (4, 2):
            batch = graphs.placed(batch_of(count))
            for _ in range(2):
                run(graphs, batch, capacity)
    first, second, third, fourth = recorder.pools
    assert first is third is None
    assert second is not None
    assert fourth is not None
    assert recorder.recorded == 4


def test_recordings_are_bounded(monkeypatch):
    monkeypatch.setattr("tasks.sampling.engines.step_graphs._KEPT_MAX", 2)
    recorder = Recorder()
    graphs = StepGraphs(4, recorder)
    for count in (1, 2, 3, 3, 3, 1, 1):
        run(graphs, graphs.placed(batch_of(count)))
    assert len(graphs._recorded) == 2
    assert recorder.recorded == 2


@pytest.mark.parametrize("failure", ["wait", "no memory"])
def test_a_step_that_cannot_be_recorded_is_run_and_one_line_says_so(failure, caplog):
    recorder = Recorder()
    graphs = StepGraphs(4, recorder)
    batch = graphs.placed(batch_of(2))

    def step():
        if failure == "wait":
            float(batch.token_ids[0])
        return step_of(batch)()

    def no_memory(step, pool):
        raise torch.OutOfMemoryError("out of memory\nand much more")

    if failure == "no memory":
        graphs._record = no_memory
    with caplog.at_level(logging.WARNING):
        found = [graphs.run(batch, 512, step).tolist()[0][0] for _ in range(4)]
    assert found == [2, 4, 8, 16]
    assert len(caplog.messages) == 1
    assert "steps are launched operation by operation, which costs time only: " in caplog.text
    assert recorder.launched == 0
