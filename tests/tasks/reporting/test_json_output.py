"""What commands print with --json is JSON, whatever numbers a run holds."""

import ast
import json
import math
from dataclasses import dataclass, replace

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from gleaner import main
from storage.records import layout, records
from storage.records.run import read_report
from storage.stores.connect import connect
from tasks.reporting.json_output import json_output
from tests.committed_runs import begin, run_of
from tests.processes import ROOT

ODD = st.sampled_from([math.nan, math.inf, -math.inf])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | ODD | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text() | ODD, inner) | st.tuples(inner, inner),
)


def refuse(name: str) -> None:
    pytest.fail(f"{name} is no JSON")


@dataclass(frozen=True)
class Holder:
    value: object


@given(VALUES)
def test_any_value_becomes_json(value):
    assert json.loads(json_output({"value": value}), parse_constant=refuse) is not None
    assert json.loads(json_output([Holder(value)]), parse_constant=refuse) is not None


def test_numbers_that_are_finite_stay():
    assert json.loads(json_output(Holder((1.5, 2, True, None, "NaN", math.inf)))) == {
        "value": [1.5, 2, True, None, "NaN", None]
    }


def test_the_status_of_a_run_with_such_numbers_is_json(tmp_path):
    store = connect(str(tmp_path / "run"))
    run_of(store, 1)
    begin(store, {})
    report = read_report(store, 0)
    records.put(store, layout.report(0), replace(report, metrics=report.metrics | {"loss": math.nan, "kl": math.inf}))
    done = CliRunner().invoke(main, ["status", store.url, "--json"], catch_exceptions=False)
    assert '"kl": null' in done.output
    assert json.loads(done.output, parse_constant=refuse)


def test_every_command_prints_its_json_by_the_one_function():
    """`json.dumps` in what is printed would write NaN."""
    found = []
    for path in [ROOT / "gleaner.py", *(ROOT / "tasks").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("click.echo", "print"):
                found += [str(path) for part in ast.walk(node) if ast.unparse(part).startswith("json.dumps(")]
    assert found == []
