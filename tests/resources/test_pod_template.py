"""The template that is built late is, to Flyte, the one that is built at once."""

import copy
import subprocess
import sys
from collections import OrderedDict

import pytest
from flytekit import PodTemplate, task
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable
from kubernetes.client import V1Container, V1PodSpec

from resources.pod_template import PoolPodTemplate

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")
TOLERATIONS = [{"key": "spot", "operator": "Exists", "effect": "NoExecute", "tolerationSeconds": 30}]


def built_late(selector, tolerations):
    pod = {"termination_grace_period_seconds": 90, "node_selector": selector, "tolerations": tolerations}
    return PoolPodTemplate(labels={"team": "a"}, annotations={}, pod=pod, container={"env": []})


def function(number: int) -> int:
    return number


@pytest.mark.parametrize(("selector", "tolerations"), [({"pool": "spot"}, TOLERATIONS), ({}, [])])
def test_flyte_is_told_the_same_bytes(selector, tolerations):
    spec = V1PodSpec(
        containers=[V1Container(name="primary", termination_message_policy="FallbackToLogsOnError")],
        termination_grace_period_seconds=90,
        node_selector=selector or None,
        tolerations=tolerations or None,
    )
    at_once = PodTemplate(pod_spec=spec, primary_container_name="primary", labels={"team": "a"})
    late = built_late(selector, tolerations)
    assert late.version_hash() == at_once.version_hash()
    told = [
        get_serializable(OrderedDict(), SETTINGS, task(function, pod_template=template)).to_flyte_idl()
        for template in (built_late(selector, tolerations), late, at_once)
    ]
    assert told[0].SerializeToString(deterministic=True) == told[2].SerializeToString(deterministic=True)
    assert told[1] == told[2]


def test_a_copy_is_of_its_own():
    """Flyte fills the container of a copy in, for every task another one."""
    template = built_late({}, [])
    another = copy.deepcopy(template)
    another.pod_spec.containers[0].image = "x/y:2"
    assert template.pod_spec.containers[0].image is None


@pytest.mark.slow
def test_declaring_does_not_import_the_client():
    code = (
        "import sys; from resources.pools import PoolConfig, task_settings; task_settings(PoolConfig());"
        "print('kubernetes.client' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=600)
    assert done.stdout == "False\n"
