"""Runs of two ranks on one host learn what they learn with two ranks of their own, whatever is killed."""

import pytest

from tests.served_fleet import KEPT, a_shared_run, begin, make_fleet, serving, states
from tests.small_run import commit_iteration, config, plan_iteration, roll_out
from tests.tasks.learning.launched_ranks import rank_server

pytestmark = pytest.mark.slow

RANKS = {"trainer": {"nproc_per_node": 2}}


@pytest.fixture
def fleet(tmp_path):
    return make_fleet(tmp_path)


@pytest.fixture(scope="module")
def ranks_server():
    """Where the ranks of trainers of their own are forked."""
    with rank_server() as server:
        yield server


def alone(tmp_path, ranks_server, model, name, iterations, **sections):
    """The states of the same run with two ranks of its own, forked anew for each iteration."""
    url = tmp_path / "alone" / name
    settings = config(str(url), model, **{**KEPT, **RANKS, **sections})
    for iteration in range(iterations):
        plan_iteration(settings)
        roll_out(str(url), iteration)
        ranks_server.launch(f"advance {iteration}", url, 2)
        commit_iteration(str(url), iteration)
    return states(str(url))


def test_two_runs_of_two_ranks_learn_what_each_learns_alone(tmp_path, fleet, model, ranks_server):
    sections = {"a": {}, "b": {"algorithm": {"kl_coef": 0.1}}}
    runs = {name: a_shared_run(tmp_path, fleet, model, name, ranks=2, **sections[name]) for name in sections}
    with serving(fleet, "host", devices=2):
        warm = []
        for iteration in range(3):
            waiting = [begin(each, iteration) for each in runs.values()]
            warm.append([wait().metrics["sharing/warm"] for wait in waiting])
            for each in runs.values():
                commit_iteration(each.run.url, iteration)
    assert warm == [[0.0, 0.0], [1.0, 1.0], [1.0, 1.0]]
    for name, each in runs.items():
        assert states(each.run.url) == alone(tmp_path, ranks_server, model, name, 3, **sections[name])
