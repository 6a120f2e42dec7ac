"""The configuration as an input of workflows: its form, what is refused where it is given, its way to the tasks."""

import itertools
import json
from collections import OrderedDict
from pathlib import Path

import pytest
import yaml
from click import BadParameter
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.types import LiteralType
from flytekit.tools.translator import get_serializable
from google.protobuf import json_format

from tasks.configuration.form import form
from tasks.configuration.run_config import dump, load, parse
from tests.small_run import document
from workflows import uploads
from workflows.config_input import Configuration
from workflows.evaluation import evaluation
from workflows.fleet import serving
from workflows.forecast import forecast
from workflows.iteration import iteration
from workflows.regrading import regrading
from workflows.training import iterations, training

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "demo.yaml"
GOLDEN = ROOT / "tests" / "data" / "training_interface.json"
SETTINGS = SerializationSettings(ImageConfig.auto(img_name="x/y:1"), "p", "d", "v")


def interface(entity):
    return get_serializable(OrderedDict(), SETTINGS, entity).template.interface.to_flyte_idl()


def test_the_registered_interface_is_the_golden_one():
    """After a change that is meant: json_format.MessageToDict of the interface, with indent=1 and sorted keys."""
    found = json_format.MessageToDict(interface(training))
    assert json.dumps(found, indent=1, sort_keys=True) + "\n" == GOLDEN.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    "entity", [training, evaluation, forecast, iteration, regrading, serving], ids=lambda entity: entity.name
)
def test_each_workflow_has_the_form_and_no_task_has(entity):
    metadata = interface(entity).inputs.variables["config"].type.metadata
    assert json_format.MessageToDict(metadata)["definitions"].keys() == {"RunConfig"}
    assert not interface(iterations).inputs.variables["config"].type.HasField("metadata")


def leaves(schema, path=()):
    """Fields of a form by their paths; a list's items count as the field 0."""
    if schema["type"] == "object":
        for name, inner in schema["properties"].items():
            yield from leaves(inner, (*path, name))
    elif schema["type"] == "array":
        yield from leaves(schema["items"], (*path, 0))
    else:
        yield path, schema


def test_the_form_has_what_the_console_can_show_and_nothing_that_it_would_fill_in():
    text = json.dumps(form())
    assert not any(f'"{word}"' in text for word in ("$ref", "anyOf", "oneOf", "prefixItems", "default", "lora"))
    assert {schema["type"] for _, schema in leaves(form())} == {"string", "integer", "number", "boolean"}
    assert len(list(leaves(form()))) == 32, "docs/guide/on_a_cluster.md says 32"
    assert len(text) < 8000
    assert "additionalProperties" not in form()


def test_what_is_filled_into_the_form_is_a_configuration():
    given = dump(load(DEMO))
    filled = {}
    for path, schema in leaves(form()):
        value, place = given, filled
        for name in path:
            value = value[name]
        for name, following in itertools.pairwise(path):
            place = place.setdefault(name, [{}] if following == 0 else {}) if name != 0 else place[0]
        if value is not None:
            place[path[-1]] = value
        assert schema["description"]
    assert parse(filled).optimizer.learning_rate == load(DEMO).optimizer.learning_rate
    assert parse(filled).rewards == load(DEMO).rewards
    assert parse(filled).pools.rollout.memory == "2Gi"


def test_a_list_of_a_file_and_fields_is_read_where_it_is_given_and_the_file_alone_as_it_stands():
    given = yaml.safe_load(DEMO.read_text())
    assert Configuration.from_json(json.dumps(given)) == given
    changed = Configuration.from_json(json.dumps([str(DEMO), "optimizer.learning_rate=1e-6", "run.seed=9"]))
    assert changed == given | {
        "optimizer": given["optimizer"] | {"learning_rate": 1e-6},
        "run": given["run"] | {"seed": 9},
    }
    assert Configuration.from_json(json.dumps([given, "run.seed=9"]))["run"]["seed"] == 9


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (
            [str(DEMO), "optimizer.learning_rat=1"],
            "optimizer.learning_rat: unknown field; did you mean 'learning_rate'?",
        ),
        ([str(DEMO), "run"], "override: value 'run'; allowed: FIELD=VALUE, such as"),
        ([{"run": 1}, "run.url.x=1"], "run.url.x=1: run is 1; allowed: a section, or a list"),
        (["no.yaml"], "cannot be read: No such file or directory"),
        ([3], 'it is a list; allowed: a mapping, or ["my.yaml", "optimizer.learning_rate=1e-6", ...]'),
        ([str(DEMO), 3], "it is a list; allowed: "),
        ({}, "it is empty; allowed: a mapping with sections run, policy, data"),
    ],
)
def test_what_is_wrong_is_said_in_a_line_before_anything_runs(given, said):
    with pytest.raises(BadParameter) as caught:
        Configuration.from_json(json.dumps(given))
    first, line = str(caught.value).splitlines()
    assert first.endswith(" is not a valid run configuration:")
    assert line.startswith(f"  {said}")


def test_the_modules_that_it_names_go_along(tmp_path, monkeypatch):
    monkeypatch.setattr(uploads, "_own_modules", set())
    rewards = [{"function": "tests.reward_functions:beginning_with", "arguments": {"n": 3}}]
    Configuration.from_json(json.dumps(document(str(tmp_path), tmp_path, rewards=rewards)))
    assert ROOT / "tests" / "reward_functions.py" in uploads._own_files(ROOT)


def test_a_program_that_fetched_the_workflow_hands_a_mapping_over():
    kind = LiteralType.from_flyte_idl(interface(training).inputs.variables["config"].type)
    assert TypeEngine.guess_python_type(kind) is Configuration
    context, given = FlyteContextManager.current_context(), dump(load(DEMO))
    literal = TypeEngine.to_literal(context, given, Configuration, kind)
    assert TypeEngine.to_python_value(context, literal, dict) == given
    assert TypeEngine.to_python_value(context, literal, Configuration) == given
