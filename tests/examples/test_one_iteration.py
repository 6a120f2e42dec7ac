"""The example that a newcomer reads first runs, and its lost machine costs no token that was written."""

import re

import pytest

from examples.one_iteration import main

pytestmark = pytest.mark.slow


def test_an_iteration_goes_from_its_plan_to_its_report_though_a_machine_is_lost(capsys):
    main()
    said = capsys.readouterr().out
    assert re.findall(r"^(\w+)$", said, re.MULTILINE) == ["plan", "generate", "train", "conclude"]
    assert "slot 0 has lost its machine" in said
    recovered = re.search(r"slot 0: .* tokens generated, ([\d,]+) taken from the journal", said)
    assert recovered
    assert int(recovered[1].replace(",", "")) > 0
    reward = re.search(r"weight version 1, mean reward ([\d.]+)", said)
    assert reward
    assert 0 < float(reward[1]) <= 1
    assert "the best response, reward 1: " in said
