"""`gleaner check` refuses, without opening a file of the user's, what `plan` or the cluster would refuse later.

To add a case, add a line to REFUSED: the sections of the configuration, and how the one line about it begins.
"""

import pytest
import yaml
from click.testing import CliRunner

from gleaner import main
from tasks.configuration.run_config import ConfigError, parse
from tasks.preparing.checks import check_settings
from tasks.preparing.vain_settings import settings_in_vain
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


def shared(fleet, url="s3://bucket/runs/a"):
    return {"run": {"url": url}, "trainer": {"placement": "shared", "fleet": fleet}}


def tensor_parallel(size, engine="vllm", **pools):
    return {"rollout": {"engine": engine, "vllm": {"tensor_parallel_size": size}}, "pools": pools}


FLEETS = [
    *(
        "",
        "http://host/fleet",
        "gcs://bucket/fleet",
        "s3://",
        "s3:/bucket/fleet",
        "s3://bucket/fleet\n",
        " s3://b/fleet",
    ),
    *("s3://key:pw@bucket/fleet", "s3://b/../fleet", "s3://b/fleet?x=1", "file://host/fleet", "~nosuchuser/fleet"),
    *("s3://bucket/runs/a", "s3://bucket/runs/a/", "S3://bucket/runs/a", "s3://bucket/runs/a/fleet", "s3://bucket"),
    *("runs/fleet", "/srv/fleet", "memory://fleet/"),
]
NAMES = [
    ({"policy": {"path": "m", "revision": "main\n"}}, "policy.revision"),
    ({"policy": {"path": "models/m\t"}}, "policy.path"),
    ({"data": {"source": "a/b", "revision": "v1\r"}}, "data.revision"),
    ({"data": {"source": "a/b", "subset": "main\n"}}, "data.subset"),
    ({"data": {"source": "a/b", "split": "train\n"}}, "data.split"),
    ({"data": {"source": "rows.jsonl\n"}}, "data.source"),
    ({"data": {"source": "rows.jsonl", "prompt_column": "prompt\0"}}, "data.prompt_column"),
    ({"evaluation": {"data": {"source": "a/b", "split": "test\u2028"}}}, "evaluation.data.split"),
    ({"rewards": [{"function": "my:reward\n"}]}, "rewards.0.function"),
    ({"rewards": [{"function": "reward_model", "model": "a/b", "revision": "x\x1b"}]}, "rewards.0.revision"),
    ({"tracking": {"name": "first\n"}}, "tracking.name"),
    ({"pools": {"train": {"machine": "g6.xlarge\n"}}}, "pools.train.machine"),
]
SIZES = [
    *(("memory", size) for size in ("0", "0Gi", "0.0", "16", "1k", "63Mi", "2Pi", "1E")),
    *(("cpu", size) for size in ("0", "0m", "1n", "9m", "4Gi", "11k")),
]

REFUSED = [
    *((shared(url), "  trainer.fleet: ") for url in FLEETS),
    (shared("/srv/runs/a/../a", "/srv/runs/a"), "  trainer.fleet: value '/srv/runs/a/../a'; allowed: a directory of"),
    (shared("s3://bucket/fleet", "/srv/runs/a"), "  trainer.fleet: value 's3://bucket/fleet'; allowed: a place"),
    *((sections, f"  {path}: ") for sections, path in NAMES),
    *((pool(**{name: size}), f"gleaner: pools.rollout.{name}: value {size!r}; allowed: ") for name, size in SIZES),
    ({"pools": {"control": {"memory": "0"}}}, "gleaner: pools.control.memory: value '0'; allowed: 64Mi to 1Pi"),
    (
        {"pools": {"more_rollout": {"spot-": {"count": 1}}}},
        "  pools.more_rollout: value 'spot-'; allowed: names of up to 40 small letters",
    ),
    ({"pools": {"more_rollout": {"far": {"cpu": 0}}}}, "gleaner: pools.more_rollout.far.cpu: value '0'; allowed: 10m"),
    (
        tensor_parallel(2, rollout={"gpus": 1}),
        "  pools.rollout.gpus: value 1; allowed: 0, or a multiple of rollout.vllm.tensor_parallel_size (2)",
    ),
    (tensor_parallel(2, "auto", rollout={"gpus": 1}), "  pools.rollout.gpus: value 1; allowed: 0, or a multiple"),
    (tensor_parallel(3, rollout={"gpus": 8}), "  pools.rollout.gpus: value 8; allowed: 0, or a multiple"),
    (
        tensor_parallel(4, rollout={"gpus": 4}, more_rollout={"far": {"gpus": 2}}),
        "  pools.more_rollout.far.gpus: value 2; allowed: 0, or a multiple",
    ),
    *(({"run": {"url": url}}, "  run.url: ") for url in URLS),
    (
        {"pools": {"control": {"machine": "potato", "usd_per_hour": None}}},
        "gleaner: pools.control.machine: no price for 'potato'",
    ),
    (
        {"pools": {"more_rollout": {"b": {"machine": "potato"}}}},
        "gleaner: pools.more_rollout.b.machine: no price for 'potato'",
    ),
    ({"pools": {"train": {"machine": "potato"}}}, "gleaner: pools.train.machine: no price for 'potato'"),
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
    ({"rewards": [MATH, MATH]}, "  rewards: 'math' is configured twice"),
    (
        {"rewards": [MATH | {"name": "a"}, {"function": "format", "arguments": {"pattern": "x"}, "name": "a"}]},
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
    (pool(labels={"run": "s3://bucket/run"}), "  pools.rollout.labels.run: value 's3://bucket/run'"),
    (pool(env=[{"name": "A", "value": 1}]), "  pools.rollout.env.0.value: value 1; allowed: text"),
    ({"pools": {"labels": {"gleaner-pool": "x"}}}, "  pools.labels.gleaner-pool: value 'x'"),
    (pool(accelerator="nvidia l4"), "  pools.rollout.accelerator: value 'nvidia l4'"),
    (pool(node_selector={"cloud.google.com/gke-spot": "true"}), "  pools.rollout.node_selector.cloud.google.com/gke-s"),
    (pool(node_selector={"karpenter.sh/capacity-type": "spot"}), "  pools.rollout.node_selector.karpenter.sh/capac"),
    (pool(node_selector={"eks.amazonaws.com/capacityType": "SPOT"}), "  pools.rollout.node_selector.eks.amazonaws"),
    ({"optimizer": {"learning_rate": "1e-400"}}, '  optimizer.learning_rate: "1e-400" given; input should be a valid'),
    ({"data": {"limit": 1 << 63}}, "  data.limit: an integer of 64 bits given"),
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
        pool(labels={"team": None, "kueue.x-k8s.io/queue-name": "spot"}, env=[{"name": "A", "value": "x"}]),
        tolerates(key="nvidia.com/gpu", operator="Equal", value="present", effect="NoSchedule"),
        tolerates(key="a", effect="NoExecute", tolerationSeconds=30),
        pool(node_selector={"cloud.google.com/gke-accelerator": "nvidia-l4", "empty": ""}),
        pool(node_selector={"cloud.google.com/gke-spot": "true"}, interruptible=False),
        pool(node_selector={"cloud.google.com/gke-spot": "false"}),
        {"run": {"url": "s3://bucket/runs/user=me/7"}},
        shared("s3://bucket/fleet"),
        shared("gs://other/fleet"),
        shared("s3://bucket/runs/ab"),
        shared("runs/fleet", "runs/a"),
        shared("file:///srv/fleet", "/srv/a"),
        tensor_parallel(2, rollout={"gpus": 4}),
        tensor_parallel(2, rollout={"gpus": 0}),
        tensor_parallel(2, "torch", rollout={"gpus": 1}),
        pool(memory="64Mi", cpu="10m"),
        pool(memory="1Pi", cpu="10k"),
        pool(env=[{"name": "KEY", "value": "two\nlines"}]),
        {"rewards": [{"function": "format", "arguments": {"pattern": "a\nb"}}]},
        {"rewards": [{"function": "my:reward", "arguments": {"text": "a\nb"}}]},
        {"data": {"source": "rows.jsonl", "chat_template_kwargs": {"date": "a\nb"}}},
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


GENERATED = {"source": "arithmetic", "limit": 10}


@pytest.mark.parametrize(
    ("sections", "doubts"),
    [
        ({}, []),
        ({"optimizer": {"learning_rate": 0}}, ["optimizer.learning_rate: value 0"]),
        ({"rewards": [MATH | {"weight": 0}]}, ["rewards: every weight is 0"]),
        ({"rewards": [MATH | {"weight": 0}, {"function": "format", "arguments": {"pattern": "x"}}]}, []),
        ({"sampling": {"temperature": 0}}, ["sampling.temperature: value 0"]),
        ({"evaluation": {"data": GENERATED | {"shuffle": False}}}, ["evaluation.data: the prompts of training"]),
        ({"evaluation": {"data": GENERATED | {"seed": 1}, "sampling": {"temperature": 0}}}, []),
        (tensor_parallel(2, rollout={"gpus": 8}), ["pools.rollout.gpus: value 8, of which a member uses"]),
        (tensor_parallel(2, rollout={"gpus": 2}), []),
        (tensor_parallel(1, "torch", rollout={"gpus": 1}, train={"gpus": 8}), []),
    ],
)
def test_what_is_allowed_and_hardly_meant_is_doubted(sections, doubts):
    found = settings_in_vain(parse(document("memory://check", "model", **{"data": GENERATED} | sections)))
    assert [line[: len(start)] for line, start in zip(found, doubts, strict=True)] == doubts


@pytest.mark.parametrize(("url", "source"), [("runs/x", "x.jsonl"), ("./models/../models/m/", "x.jsonl"), ("x", "x")])
def test_a_run_is_not_written_over_its_inputs(url, source):
    found = problem_of({"run": {"url": url}, "data": {"source": source}}, model="models/m")
    assert found == "accepted" if url == "runs/x" else found.startswith(f"gleaner: run.url: value {url!r}; allowed: ")
