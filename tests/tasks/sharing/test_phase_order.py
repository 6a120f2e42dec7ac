import math

from hypothesis import given
from hypothesis import strategies as st

from tasks.sharing.phase_order import DueRun, next_run


def due(name: str, waited_s: float, expected_s: float, wait_s_max: float = math.inf, share: float = 1.0) -> DueRun:
    return DueRun(id=name, waited_s=waited_s, expected_s=expected_s, wait_s_max=wait_s_max, share=share)


DUE = st.lists(
    st.builds(
        due,
        st.text("abc", min_size=1, max_size=3),
        st.floats(0, 1000),
        st.floats(1, 300),
        st.floats(0, 1000),
        st.floats(0.1, 10),
    ),
    max_size=6,
    unique_by=lambda run: run.id,
)


def test_no_run_is_next_if_none_is_due():
    assert next_run([]) is None


def test_who_waited_long_for_its_size_is_next():
    short, long = due("short", 10, 10), due("long", 50, 200)
    assert next_run([long, short]) == short
    assert next_run([due("long", 300, 200), short]).id == "long"


def test_share_weighs_the_waiting():
    assert next_run([due("a", 10, 10), due("b", 9, 10, share=2.0)]).id == "b"


def test_a_run_that_would_exceed_its_bound_is_first():
    chosen, pressed = due("chosen", 90, 30), due("pressed", 10, 100, wait_s_max=35)
    assert next_run([chosen, pressed]) == pressed
    assert next_run([chosen, due("pressed", 10, 100, wait_s_max=45)]) == chosen


def test_of_several_such_runs_the_most_urgent_is_first_the_chosen_one_among_them():
    runs = [due("a", 90, 30, wait_s_max=91), due("b", 10, 100, wait_s_max=20), due("c", 10, 100, wait_s_max=12)]
    assert next_run(runs).id == "a"
    assert next_run(runs[1:]).id == "c"


@given(DUE)
def test_the_order_in_which_runs_are_given_does_not_matter(runs):
    assert next_run(runs) == next_run(runs[::-1])
    assert (next_run(runs) is None) == (not runs)


@given(DUE)
def test_without_bounds_the_ratio_decides(runs):
    free = [due(run.id, run.waited_s, run.expected_s, math.inf, run.share) for run in runs]
    chosen = next_run(free)
    assert chosen is None or chosen.ratio == max(run.ratio for run in free)


@given(DUE)
def test_of_those_that_cannot_wait_for_the_first_by_ratio_the_most_urgent_is_chosen(runs):
    chosen = next_run(runs)
    first = next_run([due(run.id, run.waited_s, run.expected_s, math.inf, run.share) for run in runs])
    for run in runs:
        if run.id != first.id and run.spare_s < first.expected_s:
            assert chosen.spare_s <= run.spare_s
    assert chosen is None or chosen.id == first.id or chosen.spare_s < first.expected_s


@given(st.lists(st.floats(1, 60), min_size=2, max_size=5))
def test_every_run_trains_again_and_again_when_all_are_always_due(expected):
    """Even if the trainer is overloaded for ever, no run starves."""
    begun = dict.fromkeys(map(str, range(len(expected))), 0)
    due_at = dict.fromkeys(begun, 0.0)
    now_s = 0.0
    for _ in range(60 * len(expected)):
        chosen = next_run([due(name, now_s - at_s, expected[int(name)], 10.0) for name, at_s in due_at.items()])
        begun[chosen.id] += 1
        now_s += chosen.expected_s
        due_at[chosen.id] = now_s
    assert min(begun.values()) > 10
