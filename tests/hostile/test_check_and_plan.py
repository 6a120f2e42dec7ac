"""Whatever `gleaner check` accepts, `plan` accepts: configurations are drawn from the configuration's own schema."""

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter

from storage.clock import ManualClock
from tasks.configuration.run_config import ConfigError, RunConfig, parse
from tasks.grading.reward import GradingError
from tasks.preparing.checks import check_files, check_settings
from tasks.preparing.iteration import prepare
from tasks.sampling.engines.engine import EngineError
from tests.property_examples import part_of_examples
from tests.small_run import document, memory_store

SCHEMA = TypeAdapter(RunConfig).json_schema()
LARGEST = 40
# The test chooses where the run and the model are. Trackers would be imported.
LEFT_ALONE = {"run.url", "policy.path", "tracking.backends", "rollout.engine", "forecast.step_s"}
TEXTS = ["3", "4Gi", "arithmetic", "length", "g6.xlarge", "spot", "a b", "a\n", ""]


def resolved(schema):
    """What a reference to another part of the schema stands for."""
    return SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]] if "$ref" in schema else schema


def leaves(schema, path=""):
    """(path, schema) of every value of the configuration that is no section."""
    for name, inner in schema["properties"].items():
        part = resolved(inner)
        if "properties" in part:
            yield from leaves(part, f"{path}{name}.")
        elif f"{path}{name}" not in LEFT_ALONE:
            yield f"{path}{name}", inner


def number(schema, kind):
    """A strategy for the numbers in a schema's bounds, if these are not wide, and some just outside."""
    low = schema.get("minimum", schema.get("exclusiveMinimum", 0))
    high = min(schema.get("maximum", schema.get("exclusiveMaximum", low + LARGEST)), low + LARGEST)
    return kind(int(low) - 1, int(high) + 1)


def values(schema):
    """A strategy for the values that a schema describes, and for some that it does not."""
    schema = resolved(schema)
    if "anyOf" in schema:
        return st.one_of(*map(values, schema["anyOf"]))
    if "enum" in schema:
        return st.sampled_from([*schema["enum"], "no such"])
    simple = {
        "integer": lambda: number(schema, st.integers),
        "number": lambda: number(schema, st.floats) | st.sampled_from(["1e-6", "1e-400", 1]),
        "boolean": st.booleans,
        "null": st.none,
        "array": lambda: st.lists(values(schema.get("items", {})), max_size=2),
        "object": lambda: mappings(schema),
    }
    return simple.get(schema.get("type"), lambda: st.sampled_from(TEXTS))()


def mappings(schema):
    if "properties" not in schema:
        return st.dictionaries(st.sampled_from(["a", "b c", "spot"]), st.sampled_from(TEXTS), max_size=2)
    required = schema.get("required", [])
    optional = [name for name in schema["properties"] if name not in required]
    own = st.fixed_dictionaries({name: values(schema["properties"][name]) for name in required})
    more = st.sampled_from(optional).flatmap(
        lambda name: st.fixed_dictionaries({name: values(schema["properties"][name])})
    )
    return st.builds(lambda a, b: a | b, own, more)


PATHS = dict(leaves(SCHEMA))


def checked(whole):
    """The configuration if `gleaner check --files` accepts it, else what it says. Other errors would be tracebacks."""
    try:
        settled = parse(whole)
        check_settings(settled)
        check_files(settled)
    except ConfigError as error:
        return "".join(error.problems)
    except (ValueError, LookupError, GradingError, EngineError) as error:
        return str(error)
    return settled


def test_the_schema_has_all_sections():
    assert len(PATHS) > 120
    assert {path.partition(".")[0] for path in PATHS} == set(SCHEMA["properties"])


@settings(max_examples=part_of_examples(0.5), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
@pytest.mark.slow
def test_plan_accepts_what_check_accepts(model, data):
    """A few values at a time are drawn, so that many of the configurations are accepted."""
    whole = document("memory://check", model)
    for path in data.draw(st.lists(st.sampled_from(sorted(PATHS)), max_size=3, unique=True)):
        *parents, name = path.split(".")
        section = whole
        for parent in parents:
            section = section.setdefault(parent, {})
        section[name] = data.draw(values(PATHS[path]), label=path)
    store = memory_store("check")
    found = checked(whole)
    if isinstance(found, str):
        assert all(found.split("\n"))
        return
    reference, _ = prepare(found, "test", ManualClock())
    assert reference.iteration == 0
    assert store.list("") != []
