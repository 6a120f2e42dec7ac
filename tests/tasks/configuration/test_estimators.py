import inspect
import re
from pathlib import Path

import pytest

from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.estimators import ESTIMATORS, OPTIONS
from tasks.configuration.run_config import digest, parse

GUIDE = Path(__file__).parents[3] / "docs/guide/algorithms.md"
OFFERED = {
    False: {"rewards", "lengths", "num_generations", "counted"},
    True: {"token_rewards", "response_mask", "values"},
}
# The critic's loss reads it; the estimator does not.
READ_ELSEWHERE = {"value_clip"}
MINIMAL = {
    "run": {"url": "runs/a"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}


def own(name, **fields):
    return AlgorithmConfig(advantage_estimator=f"tests.own_estimators:{name}", **fields)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_row_of_the_table_and_its_function_agree(name):
    row = ESTIMATORS[name]
    parameters = set(inspect.signature(row.load()).parameters)
    assert parameters - row.reads <= OFFERED[row.per_token]
    assert row.reads - parameters <= READ_ELSEWHERE
    assert ("values" in parameters) == row.needs_critic
    assert AlgorithmConfig(advantage_estimator=name).estimator is row


def test_the_guide_has_a_row_for_every_estimator():
    table = GUIDE.read_text(encoding="utf-8").partition("## Advantage estimators")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\w+)` \| (.*) \|$", table, re.MULTILINE))
    del rows["advantage_estimator"]
    assert set(rows) == set(ESTIMATORS)
    for name, estimator in ESTIMATORS.items():
        needs, reads, filters = [cell.strip() for cell in rows[name].split("|")][1:4]
        assert set(re.findall(r"`(\w+)`", reads)) == estimator.reads
        assert ("whole step" in needs) == (estimator.scope == "batch")
        assert ("critic" in needs) == estimator.needs_critic
        assert filters == ("yes" if estimator.group_baseline else "no")


def test_an_own_function_has_its_place_in_the_configuration():
    assert own("mean_baseline").streams
    assert not own("mean_baseline", advantage_scope="batch").streams
    assert own("mean_baseline", filter_groups=True).estimator.reads == {"advantage_scope"}
    assert not own("mean_baseline").estimator.needs_critic
    for option in sorted(OPTIONS - {"advantage_scope"}):
        value = "batch" if option == "scale_rewards" else 0.5
        with pytest.raises(ValueError, match=f"^{option}: value .*; allowed with advantage_estimator 'own:f'"):
            AlgorithmConfig(advantage_estimator="own:f", **{option: value})


def test_the_configuration_names_an_own_function_without_importing_it():
    assert AlgorithmConfig(advantage_estimator="no_such_module:f").estimator.function == "no_such_module:f"


def test_the_functions_name_and_scope_are_part_of_what_a_run_is():
    algorithms = [
        {},
        {"advantage_estimator": "own:f"},
        {"advantage_estimator": "own:g"},
        {"advantage_estimator": "own:g", "advantage_scope": "batch"},
    ]
    digests = {digest(parse(MINIMAL | {"algorithm": algorithm})) for algorithm in algorithms}
    assert len(digests) == len(algorithms)


@pytest.mark.parametrize("name", ["mean_baseline", "per_token_of_the_group"])
def test_a_function_that_fits_is_accepted(name):
    own(name).estimator.check()


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("tests.own_estimators:absent", "tests.own_estimators has no 'absent'; there are: .*mean_baseline"),
        ("no_such_module:f", "importing it raises ModuleNotFoundError: No module named 'no_such_module'"),
        ("tests.own_estimators:not_a_function", "it is of type int; allowed: a function"),
        ("tests.own_estimators:of_something_else", r"its parameters do not fit: missing .*'scores'"),
        ("tests.own_estimators:of_too_much", r"its parameters do not fit: missing .*'critic'"),
        ("tests.own_estimators:of_anything", r"its parameters are \(\*\*tensors"),
        ("tests.own_estimators:by_position", "its parameters do not fit: "),
        ("builtins:dict", "its parameters do not fit: "),
        ("leaving_estimators:f", "importing it raises SystemExit: not today"),
        ("broken_estimators:f", "importing it raises RuntimeError: two lines"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line(tmp_path, monkeypatch, function, reason):
    (tmp_path / "leaving_estimators.py").write_text("raise SystemExit('not today')")
    (tmp_path / "broken_estimators.py").write_text("raise RuntimeError('two\\nlines')")
    monkeypatch.syspath_prepend(tmp_path)
    allowed = "allowed: a function of rewards, and of lengths and counted if it wants them, that can be imported, but "
    with pytest.raises(
        ValueError, match=f"^algorithm.advantage_estimator: value '{function}'; {allowed}{reason}"
    ) as caught:
        AlgorithmConfig(advantage_estimator=function).estimator.check()
    assert "\n" not in str(caught.value)


def test_with_turns_a_function_of_the_whole_step_must_say_that_it_knows_of_failed_responses():
    name, scope = "tests.own_estimators:batch_baseline", {"advantage_scope": "batch"}
    AlgorithmConfig(advantage_estimator=name, **scope).estimator.check()
    with pytest.raises(ValueError, match="it takes no `counted`, which says which responses did not fail"):
        AlgorithmConfig(advantage_estimator=name, **scope).estimator.check(with_turns=True)
    AlgorithmConfig(advantage_estimator=name).estimator.check(with_turns=True)  # by group it gets those that count
    knowing = AlgorithmConfig(advantage_estimator="tests.own_estimators:counted_baseline", **scope)
    knowing.estimator.check(with_turns=True)
