"""Results of calls that are longer than allowed: what is kept of them, and what a repeated call is compared with."""

import pytest

from tasks.turns.living_environments import CUT_MARK, cut, same_result


@pytest.mark.parametrize("characters", [0, 1, 4, 9])
def test_a_cut_result_is_its_first_characters_and_one_mark(characters):
    assert cut("0123456789", characters) == "0123456789"[:characters] + CUT_MARK


def test_a_result_that_is_cut_again_loses_characters_and_keeps_one_mark():
    once = cut("0123456789", 7)
    assert cut(once, 3) == "012" + CUT_MARK
    assert cut(once, 7) == once
    assert cut(once, 100) == once


def test_a_repeated_call_gives_what_was_recorded_if_that_is_how_its_result_begins():
    assert same_result("all", "all")
    assert same_result(cut("0123456789", 4), "0123456789")
    assert not same_result("0123", "0123456789")
    assert not same_result(cut("0123456789", 4), "0129456789")
    assert not same_result(cut("0123456789", 4), "012")
