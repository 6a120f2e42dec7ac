"""How the nodes of an execution are called, and which labels their pods have."""

import pytest

from resources.labels import url_label
from workflows.node_names import NodeNames

RUN = "s3://bucket/run"


@pytest.mark.parametrize("number", [1, 2, 10])
def test_every_iteration_has_its_number_in_all_its_names_the_first_one_too(number):
    names = NodeNames.of_iteration(number, 10, RUN)
    named = {"node_name": f"z{number}-end-of-rollout", "name": f"iteration {number} of 10: end of rollout"}
    assert names.of("end-of-rollout") == named
    labels = {"gleaner-run": url_label(RUN), "gleaner-iteration": str(number), "gleaner-pool": "spot"}
    assert names.labels("spot") == labels


def test_what_comes_before_the_first_iteration_and_what_serves_all_say_so():
    before, all_of_them = NodeNames.of_iteration(0, 10, RUN), NodeNames.of_execution(10, RUN)
    assert before.of("evaluate") == {"node_name": "z0-evaluate", "name": "before iteration 1 of 10: evaluate"}
    assert before.labels("train")["gleaner-iteration"] == "0"
    assert all_of_them.of("rollout") == {"node_name": "zall-rollout", "name": "iterations 1 to 10: rollout"}
    assert all_of_them.labels("rollout")["gleaner-iteration"] == "all"


def test_nodes_of_a_workflow_that_is_declared_before_its_run_is_known_name_only_their_pool():
    assert NodeNames().labels("train") == {"gleaner-pool": "train"}
    assert NodeNames().of("train") == {"node_name": "train", "name": "train"}
