"""From which share of an iteration on a trainer that stands is recommended."""

import pytest

from tasks.planning.standing_advice import SHARE_MIN, advice_to_stand


@pytest.mark.parametrize("placement", ["own", "pod"])
def test_it_is_recommended_from_three_per_cent_of_an_iteration_on(placement):
    assert SHARE_MIN == 0.03
    assert advice_to_stand(placement, 3.0, 100.0) == ""
    said = advice_to_stand(placement, 21.0, 47.0)
    assert said.startswith("restoring and writing the trainer's state takes 21 s of an iteration of 47 s (45%); ")
    assert "trainer.placement 'standing'" in said
    assert "\n" not in said


@pytest.mark.parametrize("placement", ["standing", "shared"])
def test_a_host_keeps_its_state_already(placement):
    assert advice_to_stand(placement, 21.0, 47.0) == ""


def test_of_an_iteration_of_unknown_length_nothing_is_said():
    assert advice_to_stand("own", 21.0, 0.0) == ""
