"""The requests with which vLLM's start ends, on a core that records what it gets."""

from dataclasses import dataclass

import pytest

from tasks.sampling.engines.engine import EngineDied
from tasks.sampling.engines.vllm_core import CoreRequest
from tasks.sampling.engines.vllm_warmup import ROWS, warm_up


@dataclass
class Output:
    request_id: str
    finished: bool


class RecordingCore:
    """Ends each request after `steps` outputs; never, with 0."""

    def __init__(self, steps=2):
        self._steps = steps
        self._left = {}
        self.together = []

    def start(self, requests):
        assert not self._left, "the former requests are still in flight"
        self._left = {request.name: self._steps for request in requests}
        self.together.append(len(requests))

    def outputs(self):
        if not self._steps:
            return []
        self._left = {name: left - 1 for name, left in self._left.items()}
        found = [Output(name, left == 0) for name, left in self._left.items()]
        self._left = {name: left for name, left in self._left.items() if left}
        return found


def requests(count):
    return [CoreRequest(f"w{count}-{number}", [0], None, "0") for number in range(count)]


@pytest.mark.parametrize(("rows_max", "together"), [(1, [1]), (8, [1, 2]), (256, list(ROWS))])
def test_each_kind_of_number_of_rows_is_decoded_to_its_end_as_far_as_vllm_decodes_as_many(rows_max, together):
    core = RecordingCore()
    assert warm_up(core, requests, rows_max, 10.0) >= 0
    assert core.together == together
    assert not core.outputs()


def test_a_vllm_that_sends_nothing_has_died():
    with pytest.raises(EngineDied, match="while it warmed up"):
        warm_up(RecordingCore(steps=0), requests, 4, 0.01)
