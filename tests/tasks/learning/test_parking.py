"""Parking two ranks, on a machine that has no second device: moved states are moved within host memory."""

import pytest

pytestmark = pytest.mark.slow


def test_ranks_that_are_parked_and_moved_between_steps_learn_the_same(ranks_server, tmp_path):
    first, second = ranks_server.launch("park", tmp_path, 2)
    for rank in (first, second):
        stayed, moved = rank["found"]
        assert moved == stayed
        assert rank["found"][0]["steps"] == first["found"][0]["steps"]
    # Rows that do not divide evenly are padded.
    assert 0.9 < first["found"][0]["bytes"] / second["found"][0]["bytes"] < 1.2


def test_all_ranks_go_on_with_the_first_ranks_generator(ranks_server, tmp_path):
    first, second = ranks_server.launch("park", tmp_path, 2)
    assert first["drawn"][0] == second["drawn"][0]
