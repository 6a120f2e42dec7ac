"""What the benchmark of recording apart counts as too expensive, and as other tensors."""

import json

import pytest

from benchmarks.sharing_collecting import APART, CLAIMED, OWN, Found, report


@pytest.mark.parametrize(
    ("collector_s", "unequal", "met"),
    [
        ([0.05] * 8, 0, (True, True)),
        ([0.2] * 8, 0, (False, True)),
        ([0.05] * 6 + [0.2] * 2, 0, (False, True)),
        ([0.05] * 8, 1, (True, False)),
    ],
)
def test_a_collector_that_may_take_more_than_a_per_cent_and_any_other_tensor_are_missed(
    capsys, collector_s, unequal, met
):
    seconds = {OWN: [10.0] * 8, APART: [10.1] * 8}
    report({CLAIMED: Found(seconds, collector_s, 3, unequal)}, {"rounds": 8}, as_json=True)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert tuple(target["met"] for target in summary["targets"].values()) == met
