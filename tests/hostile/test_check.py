"""`gleaner check` refuses, without opening a file of the user's, what `plan` or the cluster would refuse later.

To add a case, add a line to REFUSED: the sections of the configuration, and how the one line about it begins.
"""

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from tasks.configuration.run_config import ConfigError, parse
from tasks.preparing.checks import check_settings
from tests.small_run import document

MATH = {"function": "math"}
URLS = [
    *(
        "gcs://bucket/x",
        "adl://c/x",
        "abfs://c/x",
        "hdfs://h/x",
        "http://host/x",
        "https://user:pw@host/x",
        "ftp://h/x",
    ),
    *("s3://", "s3:///x", "s3:/bucket/x", "s3:bucket/x", "s3://b/../x", "s3://../x", "s3://b/a//c", "s3://b/x?y=1"),
    *("s3://key:pw@bucket/x", "s3://b/" + "x" * 1000, "file://host/x", "file://", "file:/x", "file:///a%00b"),
    *("memory://", "memory://a//b", "a\0b", "a\nb", " runs/x", "runs/x ", "\tx", "a\x1bb", "x" * 300, "y/" * 2000),
    *("~nosuchuser/x", "user:pw@host", "C:\\runs"),
]


def pool(**fields):
    return {"pools": {"rollout": fields}}


def tolerates(**fields):
    return pool(tolerations=[fields])


REFUSED = [
    *(({"run": {"url": url}}, "  run.url: ") for url in URLS),
    ({"pools": {"control": {"machine": "potato", "usd_per_hour": None}}}, "gleaner: machine: no price for 'potato'"),
    ({"pools": {"more_rollout": {"b": {"machine": "potato"}}}}, "gleaner: machine: no price for 'potato'"),
    ({"pools": {"train": {"machine": "potato"}}}, "gleaner: machine: no price for 'potato'"),
    (
        {"sampling": {"max_completion_length": 64}, "rollout": {"context_length": 64}},
        "  sampling.max_completion_length: value 64; allowed: less than rollout.context_length (64)",
    ),
    (
        {
            "rollout": {"context_length": 64},
            "evaluation": {"data": {"source": "arithmetic"}, "sampling": {"max_completion_length": 99}},
        },
        "  evaluation.sampling.max_completion_length: value 99; allowed: less than",
    ),
    (
        {"evaluation": {"data": {"source": "arithmetic", "size": 3}, "num_prompts": 4, "interval": 1}},
        "gleaner: evaluation.num_prompts: value 4; allowed: null, or 1 to 3",
    ),
    ({"rewards": [MATH, MATH]}, "  rewards: 'math' is configured twice"),
    (
        {"rewards": [MATH | {"name": "a"}, {"function": "format", "pattern": "x", "name": "a"}]},
        "  rewards: 2 functions",
    ),
    (
        {"evaluation": {"data": {"source": "arithmetic"}, "rewards": [MATH, MATH]}},
        "  evaluation.rewards: 'math' is configured twice",
    ),
    (
        tolerates(key="spot", operator="Exist"),
        "  pools.rollout.tolerations.0.operator: value 'Exist'; allowed: Exists, Equal",
    ),
    (tolerates(key="spot", operator="Exists", value="x"), "  pools.rollout.tolerations.0.value: value 'x'; allowed"),
    (
        tolerates(key="a", effect="NoSchedule", tolerationSeconds=30),
        "  pools.rollout.tolerations.0.tolerationSeconds",
    ),
    (
        tolerates(key="a", effect="NoExecute", tolerationSeconds="30"),
        "  pools.rollout.tolerations.0.tolerationSeconds",
    ),
    (
        tolerates(effect="NoExecute"),
        "  pools.rollout.tolerations.0.operator: value null; allowed: 'Exists', because there is no key",
    ),
    (tolerates(key="a", effect="NoRun"), "  pools.rollout.tolerations.0.effect"),
    (tolerates(key="a b"), "  pools.rollout.tolerations.0.key: label 'a b'"),
    (tolerates(key="-a"), "  pools.rollout.tolerations.0.key: label '-a'"),
    (tolerates(key="a/b/c"), "  pools.rollout.tolerations.0.key: label 'a/b/c'"),
    (tolerates(key="Cloud.com/x"), "  pools.rollout.tolerations.0.key: label"),
    (tolerates(key="a", value="x y"), "  pools.rollout.tolerations.0.value: value 'x y'"),
    (tolerates(key="a", value="x" * 64), "  pools.rollout.tolerations.0.value: value"),
    (pool(node_selector={"pool": "a b"}), "  pools.rollout.node_selector.pool: value 'a b'"),
    (pool(node_selector={"a b": "x"}), "  pools.rollout.node_selector: label 'a b'"),
    (pool(node_selector={"": "x"}), "  pools.rollout.node_selector: label ''"),
    (pool(node_selector={"/x": "x"}), "  pools.rollout.node_selector: label '/x'"),
    (pool(node_selector={"pool": 7}), "  pools.rollout.node_selector.pool: 7 given"),
    (pool(cpu="2 Gi"), '  pools.rollout.cpu: "2 Gi" given; allowed: a Kubernetes quantity'),
    (pool(cpu=True), "  pools.rollout.cpu: true given; allowed: a Kubernetes quantity"),
    (pool(memory="-1Gi"), '  pools.rollout.memory: "-1Gi" given; allowed: a Kubernetes quantity of at least 0'),
    (pool(queue="team/gpus"), "  pools.rollout.queue: value 'team/gpus'"),
    (pool(labels={"run": "s3://bucket/run"}), "  pools.rollout.labels.run: value 's3://bucket/run'"),
    (pool(env=[{"name": "A", "value": 1}]), "  pools.rollout.env.0.value: value 1; allowed: text"),
    ({"pools": {"labels": {"gleaner-pool": "x"}}}, "  pools.labels.gleaner-pool: value 'x'"),
    (pool(accelerator="nvidia l4"), "  pools.rollout.accelerator: value 'nvidia l4'"),
    (pool(node_selector={"cloud.google.com/gke-spot": "true"}), "  pools.rollout.node_selector.cloud.google.com/gke-s"),
    (pool(node_selector={"karpenter.sh/capacity-type": "spot"}), "  pools.rollout.node_selector.karpenter.sh/capac"),
    (pool(node_selector={"eks.amazonaws.com/capacityType": "SPOT"}), "  pools.rollout.node_selector.eks.amazonaws"),
    ({"optimizer": {"learning_rate": "1e-400"}}, '  optimizer.learning_rate: "1e-400" given; input should be a valid'),
    ({"data": {"size": 1 << 63}}, "  data.size: an integer of 64 bits given"),
    ({"run": {"seed": 10**6000}}, "  run.seed: an integer of "),
    ({"tracking": {"name": "\ud83d"}}, '  tracking.name: "\\ud83d" given; allowed: text without lone surrogates'),
    ({"tracking": {"\udc00": 1}}, '  tracking: the key "\\udc00" given; allowed: text without'),
]


@pytest.fixture
def path(tmp_path):
    return tmp_path / "config.yaml"


def problem_of(sections, model="model"):
    """The one line that a check prints about these sections."""
    try:
        check_settings(parse(document(sections.get("run", {}).get("url", "memory://check"), model, **sections)))
    except ConfigError as error:
        [line] = str(error).splitlines()[1:]
        return line
    except (ValueError, LookupError) as error:
        return f"gleaner: {error}"
    return "accepted"


@pytest.mark.parametrize(("sections", "message"), REFUSED)
def test_it_is_refused_in_one_line_that_names_the_field(sections, message):
    found = problem_of(sections)
    assert found.startswith(message), found
    assert "pw" not in found
    assert len(found) < 700


@pytest.mark.parametrize(
    "sections",
    [
        tolerates(key="spot", operator="Exists"),
        tolerates(operator="Exists"),
        pool(labels={"team": None}, queue="spot", env=[{"name": "A", "value": "x"}]),
        tolerates(key="nvidia.com/gpu", operator="Equal", value="present", effect="NoSchedule"),
        tolerates(key="a", effect="NoExecute", tolerationSeconds=30),
        pool(node_selector={"cloud.google.com/gke-accelerator": "nvidia-l4", "empty": ""}),
        pool(node_selector={"cloud.google.com/gke-spot": "true"}, interruptible=False),
        pool(node_selector={"cloud.google.com/gke-spot": "false"}),
        {"run": {"url": "s3://bucket/runs/user=me/7"}},
        {"run": {"url": "./a:b"}},
        {"rewards": [MATH | {"name": "a"}, MATH | {"name": "b"}]},
    ],
    ids=repr,
)
def test_what_plan_and_the_cluster_accept_is_accepted(sections):
    assert problem_of(sections) == "accepted"


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("tracking: {name: 2026-11-23}", []),
        ("run: {seed: 2026-11-23}", ['  run.seed: "2026-11-23" given; input should be a valid integer']),
        ("optimizer: {learning_rate: 1.0e-400}", ["  line 1: 1.0e-400 is no number that can be read"]),
        ("tracking: {name: !!binary aGk=}", ["  line 1: could not determine a constructor for the tag"]),
        ("run: {seed: 1}\nrun: {seed: 2}", ["  line 2: 'run' is given twice, first in line 1"]),
        ('tracking: {name: "\\ud83d"}', ["  line 1: half of a character"]),
    ],
)
def test_the_command_names_the_field_or_the_line(path, model, text, problems):
    rest = document(str(path.parent / "run"), model)
    given = yaml.safe_load(text) if not problems or "seed" in problems[0] else {}
    kept = {section: rest[section] for section in rest if section not in given and f"{section}:" not in text}
    path.write_text(f"{text}\n{yaml.safe_dump(kept)}")
    result = CliRunner().invoke(main, ["check", str(path)], catch_exceptions=False)
    shown = [line for line in result.stderr.splitlines()[1:] if not line.endswith("missing; it has no default")]
    assert [line[: len(problem)] for line, problem in zip(shown, problems, strict=True)] == problems
