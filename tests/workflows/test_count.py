"""A count below 1 is refused in one line where it is given: by `pyflyte run`, by a launch plan, or by the first pod."""

import re

import pytest
from click import BadParameter
from flytekit import LaunchPlan
from flytekit.exceptions.base import FlyteException
from flytekit.models.literals import Literal, Primitive, Scalar

from tests.whole_runs import ROOT, run_here
from tests.workflows.test_iteration import CONFIG, dispatched, job
from workflows.fleet import hosts, serving
from workflows.training import iterations, training

CONFIG_FILE = str(ROOT / "examples" / "demo.yaml")
REFUSED = r"count: value (0|-3); allowed: 1 or more"


@pytest.mark.slow
@pytest.mark.parametrize("count", ["0", "-3"])
@pytest.mark.parametrize("where", ["local", "remote"])
def test_pyflyte_refuses_it_before_anything_starts(where, count):
    """Remotely, too, before it looks for a cluster."""
    output = run_here("training", "--config", CONFIG_FILE, "--count", count, remote=where == "remote", code=2)
    assert re.search(REFUSED, output)
    assert "Traceback" not in output


def test_a_launch_plan_with_it_cannot_be_declared():
    with pytest.raises(BadParameter, match=REFUSED):
        LaunchPlan.get_or_create(training, name="never", fixed_inputs={"config": CONFIG, "count": 0})


def test_the_pod_that_gets_it_from_the_console_says_so():
    unseen = Literal(scalar=Scalar(primitive=Primitive(integer=0)))
    with pytest.raises(FlyteException, match=REFUSED):
        dispatched(iterations, config=CONFIG, count=unseen)


@pytest.mark.parametrize("entity", [training, iterations, hosts, serving])
def test_for_flyte_a_count_is_an_integer(entity):
    assert entity.interface.inputs["count"].type.to_flyte_idl().simple == 1


def test_a_count_of_one_is_one_iteration():
    assert [node.id for node in job(1).nodes if node.id.endswith("conclude")] == ["i1-conclude"]
