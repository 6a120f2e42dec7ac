"""A grading beside the recorded rewards: means, correlations and signals against NumPy's, and tables of responses."""

import math
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import gleaner
from storage.journal.compaction import read_batches
from storage.records import layout, records
from storage.records.gradings import GradedRecord, GradingRecord
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.regrading.comparing import _Moments, compare
from tasks.regrading.reward_change import FunctionChange, group_line
from tasks.reporting.export import _with_rewards
from tests.committed_runs import run_of
from tests.regraded_run import without_rewards
from tests.small_run import memory_store

VALUES = st.one_of(st.none(), st.sampled_from([-1.0, 0.0, 0.1, 0.5, 1.0, 3.0]))


def graded(iteration: int, **values: list[float | None]) -> GradedRecord:
    """A grading of the four responses of a written run; `reward` is the sum, and failures and the like are none."""
    sums = tuple(math.fsum(value or 0.0 for value in each) for each in zip(*values.values(), strict=True))
    return GradedRecord(
        iteration=iteration,
        responses=(0, 1, 2, 3),
        reward=sums,
        rewards={name: tuple(each) for name, each in values.items()},
        reward_errors=(),
        given_up=(),
    )


def store_grading(store: MemoryStore, name: str, *iterations: GradedRecord) -> None:
    records.commit(store, layout.grading(name), GradingRecord(rewards=({"name": "exact"},)))
    for record in iterations:
        records.commit(store, layout.graded(name, record.iteration), record)


@pytest.fixture
def store():
    """Two iterations, whose responses 0 to 3 have `exact` n / 4, and `style` 0.5 but for the first."""
    found = memory_store("changed", MemoryStore("changed"))
    run_of(found, 2)
    return found


def test_a_grading_is_compared_by_function_and_by_group(store):
    store_grading(
        store, "x", graded(0, exact=[0.0, 0.5, 1.0, 1.5], new=[None] * 4), graded(1, exact=[1.0, 1.0, 0.0, 0.0])
    )
    change = compare(store, "x", [0])
    assert change.functions == (
        FunctionChange(name="exact", recorded=0.375, graded=0.75, changed=3, correlation=pytest.approx(1.0)),
        FunctionChange(name="new", recorded=None, graded=None, changed=None, correlation=None),
        FunctionChange(name="style", recorded=0.5, graded=None, changed=None, correlation=None),
    )
    assert change.reward == FunctionChange(
        name="reward", recorded=0.375, graded=0.75, changed=3, correlation=pytest.approx(1.0)
    )
    assert group_line(change) == "groups with a signal: 2 of 2 as recorded, 2 as graded; 0 gain it, 0 lose it"
    both = compare(store, "x", [0, 1])
    assert (both.iterations, both.responses) == ((0, 1), 8)
    assert (both.groups.groups, both.groups.recorded, both.groups.graded) == (4, 4, 2)
    assert (both.groups.gained, both.groups.lost) == (0, 2)
    assert (both.functions[0].changed, both.functions[2].changed) == (7, None)
    recorded, again = [0.0, 0.25, 0.5, 0.75] * 2, [0.0, 0.5, 1.0, 1.5, 1.0, 1.0, 0.0, 0.0]
    assert both.functions[0].correlation == pytest.approx(np.corrcoef(recorded, again)[0, 1])


def test_a_run_without_rewards_has_no_recorded_side(store):
    store_grading(store, "x", graded(0, exact=[0.0, 0.5, 1.0, 1.5]))
    before = compare(store, "x", [0]).reward
    assert (before.recorded is None, before.changed) == (False, 3)
    after = compare(without_rewards(store, 1), "x", [0]).reward
    assert (after.recorded, after.changed, after.correlation, after.graded) == (None, None, None, before.graded)


def test_groups_that_gain_a_signal_are_counted(store):
    batches = read_batches(store, 0)
    for batch in batches:
        level = tuple(replace(response, reward=0.5) for response in batch.responses)
        records.put(store, layout.batch(0, batch.number), replace(batch, responses=level))
    store_grading(store, "x", graded(0, exact=[0.0, 1.0, 2.0, 2.0]))
    groups = compare(store, "x", [0]).groups
    assert (groups.recorded, groups.graded, groups.gained, groups.lost) == (0, 1, 1, 0)


@given(st.lists(st.lists(st.tuples(VALUES, VALUES), max_size=6), min_size=1, max_size=4))
def test_moments_of_iterations_are_those_of_all_values(iterations):
    moments = _Moments(is_in_both=True)
    for pairs in iterations:
        moments.add([old for old, _ in pairs], [new for _, new in pairs])
    change, every = moments.change("x"), [pair for pairs in iterations for pair in pairs]
    for found, values in ((change.recorded, [old for old, _ in every]), (change.graded, [new for _, new in every])):
        present = [value for value in values if value is not None]
        assert found == (pytest.approx(np.mean(present)) if present else None)
    assert change.changed == sum(old != new for old, new in every)
    both = [pair for pair in every if None not in pair]
    if len(both) < 2 or any(len(set(side)) == 1 for side in zip(*both, strict=True)):
        assert change.correlation is None
    else:
        assert change.correlation == pytest.approx(np.corrcoef(np.array(both, dtype=float).T)[0, 1], abs=1e-9)


def test_a_grading_of_other_responses_is_refused(store):
    record = graded(0, exact=[0.0] * 4)
    store_grading(store, "x", GradedRecord(**{**vars(record), "responses": (0, 1, 2, 5)}))
    with pytest.raises(CorruptObject, match="4 responses have a reward, and 4 are graded again, of other numbers"):
        compare(store, "x", [0])


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"responses": (1, 0, 2, 3)}, "responses: allowed: numbers in ascending order"),
        ({"reward": (1.0,)}, "reward: 1 values; allowed: 4, one for each response"),
        ({"rewards": {"exact": (None,)}}, "exact: 1 values; allowed: 4"),
    ],
)
def test_a_record_whose_columns_disagree_is_none(fields, error):
    with pytest.raises(ValueError, match=error):
        GradedRecord(**{**vars(graded(0, exact=[0.0] * 4)), **fields})


def test_python_reads_responses_with_the_rewards_of_a_grading(store):
    record = graded(1, exact=[1.0, None, 0.0, 0.25], another=[0.5] * 4)
    store_grading(store, "x", record)
    run = gleaner.open("memory://changed")
    own, table = run.responses(1), run.responses(1, grading="x")
    assert table["reward"].to_pylist() == list(record.reward)
    assert table["reward_exact"].to_pylist() == [1.0, None, 0.0, 0.25]
    assert table["reward_another"].to_pylist() == [0.5] * 4
    assert "reward_style" in own.column_names
    assert "reward_style" not in table.column_names
    assert table.column_names.index("reward") == own.column_names.index("reward")
    rest = [name for name in own.column_names if not name.startswith("reward")]
    assert [name for name in table.column_names if not name.startswith("reward")] == rest
    assert table.select(rest).equals(own.select(rest))


def test_a_response_that_failed_has_no_reward_in_the_table():
    responses = pa.table(
        {"response": [0, 1, 2], "reward": [1.0, None, 2.0], "reward_exact": [1.0, None, 2.0], "z": [1] * 3}
    )
    record = GradedRecord(
        iteration=0, responses=(0, 2), reward=(5.0, 6.0), rewards={"new": (None, 6.0)}, reward_errors=(), given_up=()
    )
    found = _with_rewards(responses, record, [0, None, 1])
    assert found.column_names == ["response", "reward", "reward_new", "z"]
    assert found.to_pydict() == {
        "response": [0, 1, 2], "reward": [5.0, None, 6.0], "reward_new": [None, None, 6.0], "z": [1] * 3
    }  # fmt: skip


def test_a_grading_that_names_other_responses_is_refused_where_they_are_read(store):
    record = graded(0, exact=[0.0] * 4)
    store_grading(store, "x", replace(record, responses=(0, 1, 2, 5)))
    with pytest.raises(CorruptObject, match="names responses that it does not have"):
        gleaner.open("memory://changed").responses(0, grading="x")


@pytest.mark.parametrize("name", ["y", "../x", "x/", "", "x/grading.json", "..", "."])
def test_a_grading_that_is_not_there_is_named_with_those_that_are(store, name):
    run = gleaner.open("memory://changed")
    none = "grading: value 'x'; allowed: none, as `gleaner regrade` has graded nothing yet"
    with pytest.raises(LookupError, match=none):
        run.responses(0, grading="x")
    store_grading(store, "x", graded(0, exact=[0.0] * 4))
    with pytest.raises(LookupError, match=r"^grading: value .*; allowed: x$"):
        run.responses(0, grading=name)
    with pytest.raises(LookupError, match="grading 'x' has no iteration 1; `gleaner regrade` adds it"):
        run.responses(1, grading="x")
    with pytest.raises(LookupError, match="iteration: value 2; allowed: 0 to 1"):
        run.responses(2, grading="x")


def test_a_grading_under_another_name_or_iteration_is_refused(store):
    store_grading(store, "x", graded(0, exact=[0.0] * 4))
    store.put(layout.graded("x", 1), store.get(layout.graded("x", 0)))
    with pytest.raises(CorruptObject, match=r"key: it says 'gradings/x/000000\.json'"):
        gleaner.open("memory://changed").responses(1, grading="x")
