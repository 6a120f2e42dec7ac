"""The alert rules, the dashboard and the guide's table, against the metrics of a small run; promtool where it is."""

import itertools
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tasks.reporting.exposition import NEWEST, SUMS
from tests.exposed_run import exposed, samples

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "monitoring"
RULES = yaml.safe_load((FOLDER / "alerts.yaml").read_text(encoding="utf-8"))["groups"][0]["rules"]
DASHBOARD = json.loads((FOLDER / "dashboard.json").read_text(encoding="utf-8"))
PAGE = (ROOT / "docs/guide/watching.md").read_text(encoding="utf-8")
EXPRESSIONS = [
    *(rule["expr"] for rule in RULES),
    *(target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]),
    *(each["query"]["query"] for each in DASHBOARD["templating"]["list"] if each["type"] == "query"),
]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    return exposed(tmp_path_factory.mktemp("exposed"))[0]


def promtool(*arguments, stdin=None):
    """Its exit status and all that it says."""
    program = shutil.which("promtool")
    if program is None:
        pytest.skip("no promtool: apt-get install prometheus")
    done = subprocess.run([program, *map(str, arguments)], input=stdin, capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def unknown(expressions, text):
    """Metrics, and values of their labels, that the expressions ask for and the run does not have."""
    have = samples(text)
    labels = {(name, key, each) for name, rows in have.items() for given, _ in rows for key, each in given.items()}
    for expression in expressions:
        yield from set(re.findall(r"gleaner_\w+", expression)) - have.keys()
        for name, selector in re.findall(r"(gleaner_\w+)\{(.*?)\}", expression):
            for key, asked in re.findall(r'(\w+)=~?"(.*?)"', selector):
                if not asked.startswith("$"):
                    yield from (each for each in asked.split("|") if (name, key, each) not in labels)


def test_rules_and_dashboard_ask_for_what_a_run_has(text):
    assert list(unknown(EXPRESSIONS, text)) == []
    asked = {name for expression in EXPRESSIONS for name in re.findall(r"gleaner_\w+", expression)}
    assert len(asked) > 15


def test_what_a_run_does_not_have_is_found(text):
    assert list(unknown(["rate(gleaner_lost_total[1h])"], text)) == ["gleaner_lost_total"]
    assert list(unknown(['gleaner_phase{phase=~"rollout|resting"}'], text)) == ["resting"]


def test_the_guide_has_a_row_for_each_metric_and_no_other(text):
    assert sorted(re.findall(r"^\| `(gleaner_\w+)", PAGE, flags=re.MULTILINE)) == sorted(samples(text))


def test_the_guide_says_which_metric_of_the_report_each_is():
    rows = dict(re.findall(r"^\| `(gleaner_\w+)` \| `(.*?)` \|$", PAGE, flags=re.MULTILINE))
    assert rows == {name: metric for name, (metric, _) in (SUMS | NEWEST).items()}


def test_each_rule_says_of_which_run_it_speaks_and_is_in_the_guide_and_tested():
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text(encoding="utf-8"))["tests"]
    fired = {case["alertname"] for each in tests for case in each["alert_rule_test"] if case.get("exp_alerts")}
    assert fired == {rule["alert"] for rule in RULES}
    for rule in RULES:
        assert "$labels.run" in rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert f"`{rule['alert']}`" in PAGE


def test_the_dashboard_is_one_that_grafana_loads():
    panels = DASHBOARD["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    variables = {each["name"] for each in DASHBOARD["templating"]["list"]}
    for panel in panels:
        assert panel["type"] in ("stat", "timeseries")
        assert panel["title"]
        assert panel["targets"]
        used = set(re.findall(r"\$\{?(\w+)", json.dumps(panel)))
        assert used <= variables
        assert len({target["refId"] for target in panel["targets"]}) == len(panel["targets"])
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
    for one, other in itertools.combinations((panel["gridPos"] for panel in panels), 2):
        apart_x = one["x"] + one["w"] <= other["x"] or other["x"] + other["w"] <= one["x"]
        apart_y = one["y"] + one["h"] <= other["y"] or other["y"] + other["h"] <= one["y"]
        assert apart_x or apart_y


def test_prometheus_reads_the_metrics_without_a_complaint(text):
    assert promtool("check", "metrics", stdin=text) == (0, "")
    status, complaint = promtool("check", "metrics", stdin=text.replace("_total", "_sum"))
    assert (status, "counter metrics should have" in complaint) == (3, True)


def test_the_rules_fire_and_stay_silent_as_their_tests_say():
    status, said = promtool("test", "rules", FOLDER / "alerts_test.yaml")
    assert status == 0, said


def test_prometheus_reads_the_rules_the_panels_and_the_scrape_configuration(tmp_path):
    status, said = promtool("check", "config", "--syntax-only", FOLDER / "prometheus.yaml")
    assert status == 0, said
    panels = [{"record": f"panel_{n}", "expr": e.replace("$run", ".*")} for n, e in enumerate(EXPRESSIONS[:-1])]
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "panels", "rules": panels}]}))
    status, said = promtool("check", "rules", tmp_path / "panels.yaml")
    assert status == 0, said
    (tmp_path / "panels.yaml").write_text(json.dumps({"groups": [{"name": "a", "rules": [panels[0] | {"expr": "("}]}]}))
    assert promtool("check", "rules", tmp_path / "panels.yaml")[0] != 0
