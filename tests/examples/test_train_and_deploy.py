"""The example workflow: what training puts out is bound to an evaluation and to a task of the user's."""

import re
from collections import OrderedDict

import pytest
import torch
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.tools.translator import get_serializable
from transformers import AutoModelForCausalLM

from examples.train_and_deploy import train_and_deploy
from storage.records.run import reports
from storage.stores.connect import connect
from tasks.concluding.iteration_outcomes import outcome_of
from tasks.export_policy import export_policy
from tests.small_run import document, model_directory

SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")


@pytest.mark.slow
def test_it_trains_exports_and_evaluates_by_bound_outputs(tmp_path):
    url = str(tmp_path / "run")
    told = train_and_deploy(config=document(url, model_directory(tmp_path / "model")), count=2)
    committed = reports(connect(url))
    rewards = ", ".join(f"{report.metrics['reward']:.3f}" for report in committed)
    assert len(committed) == 2
    assert re.fullmatch(rf"\w+ of weight version 2, rewards {re.escape(rewards)}, pass@1 \d\.\d{{3}}", told)

    last = outcome_of(url, committed[-1])
    policy, outcomes = export_policy(concluded=last, count=1, dtype="bfloat16")
    model = AutoModelForCausalLM.from_pretrained(policy.download(), dtype="auto")
    assert model.dtype is torch.bfloat16
    assert outcomes == [last]
    _, outcomes = export_policy(concluded=last, count=9, dtype="stored")
    assert [outcome.iteration for outcome in outcomes] == [0, 1]


def test_its_outputs_have_types_and_are_bound_by_name():
    nodes = get_serializable(OrderedDict(), SETTINGS, train_and_deploy).template.to_flyte_idl().nodes
    [deployed] = [node for node in nodes if node.task_node.reference_id.name.endswith(".deploy")]
    bound = {each.var: each.binding.promise for each in deployed.inputs}
    assert {name: promise.var for name, promise in bound.items()} == {
        "policy": "policy",
        "reports": "reports",
        "evaluated": "o0",
    }
