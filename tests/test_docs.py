"""The documentation against the tree: links, paths, commands, configuration tables, metrics, messages, snippets.

Every rule is a function from Markdown text to its complaints. It must have none here, and is shown to complain about
small texts that break it.
"""

import ast
import dataclasses
import importlib
import json
import re
import typing
from collections.abc import Callable, Iterator
from pathlib import Path

import annotated_types
import pytest
import torch
import yaml
from pydantic.fields import FieldInfo

import gleaner
from examples.warm_start import build_model, build_tokenizer
from resources.pools import PoolConfig
from resources.prices import price_table
from resources.quantities import quantity_text
from storage.clock import SystemClock
from storage.records.records import ReportRecord
from storage.stores.connect import connect
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.data import DataConfig
from tasks.configuration.optimizer import OptimizerConfig
from tasks.configuration.problems import names
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.run_config import OPERATIONAL, RunConfig, parse
from tasks.grading.grader import Grader
from tasks.grading.reward import GradingCase
from tasks.learning.advantage import advantages_of
from tasks.learning.collecting import collect
from tasks.learning.score_iteration import score_iteration
from tasks.learning.train_iteration import train_iteration
from tasks.preparing.iteration import prepare
from tasks.prompts.loading import load_prompts
from tasks.reporting.conclusion import conclude_iteration
from tasks.sampling.session.member import generate_slot
from tests.turn_journals import turns_metrics

ROOT = Path(__file__).parents[1]
GUIDE = ROOT / "docs" / "guide"
DOCUMENTS = sorted(
    [*(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "BENCHMARKS.md")), *ROOT.glob("docs/**/*.md")]
)
DOCUMENTS = [path for path in DOCUMENTS if path.exists()]
FOLDERS = ("storage", "resources", "tasks", "workflows", "simulation", "tests", "benchmarks", "examples", "docs")
ROOT_FILES = ("Makefile", "Dockerfile", "flyte.config", "constraints.txt", "pyproject.toml")
IN_TREE = re.compile(rf"(?<![\w./:-])(?:{'|'.join(FOLDERS)})/[\w./*-]*[\w*](?![\w./*-]*<)")
FENCED = re.compile(r"^(?:<!-- (.*?) -->\n+)?```(\w*)\n(.*?)^```", flags=re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def blocks(path: Path, language: str, mark: str | None = None) -> list[str]:
    """The fenced blocks of a language; with `mark` those that follow the comment `<!-- mark -->`."""
    found = FENCED.findall(path.read_text(encoding="utf-8"))
    return [body for comment, kind, body in found if kind == language and (mark is None or comment == mark)]


def anchors(text: str) -> set[str]:
    """The ids that GitHub gives to headings."""
    titles = re.findall(r"^#+ +(.*)$", FENCED.sub("", text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> Iterator[str]:
    """Relative links to files or headings that are not there."""
    for target in LINK.findall(FENCED.sub("", text)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        file = path.parent / name if name else path
        if name and not file.exists():
            yield f"{path.name}: link to {target}"
        elif anchor and anchor not in anchors(text if not name else file.read_text(encoding="utf-8")):
            yield f"{path.name}: link to {target}: no such heading"


def missing_paths(path: Path, text: str) -> Iterator[str]:
    """Paths, files and modules of this repository that are named and do not exist; '*' matches as in a shell."""
    for name in sorted(set(IN_TREE.findall(text))):
        if not any(ROOT.glob(name)) and not any(ROOT.glob(f"{name}.py")):
            yield f"{path.name}: {name}"
    for name in re.findall(r"`([\w.-]+)`", text):
        is_source = name in ROOT_FILES or re.fullmatch(r"[\w-]+\.(py|md)", name)
        if is_source and not any(any(ROOT.glob(f"{folder}**/{name}")) for folder in ("", *(f"{f}/" for f in FOLDERS))):
            yield f"{path.name}: {name}"
    for module in re.findall(rf"-m ((?:{'|'.join(FOLDERS)})\.[\w.]+)", text):
        if not any((ROOT / f"{module.replace('.', '/')}{end}").exists() for end in (".py", "/__main__.py")):
            yield f"{path.name}: python -m {module}"


def unknown_commands(path: Path, text: str) -> Iterator[str]:
    """Commands of make and gleaner that do not exist."""
    targets = set(re.findall(r"(?m)^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(encoding="utf-8")))
    for kind, known in (("make", targets), ("gleaner", set(gleaner.main.commands))):
        for command in re.findall(rf"(?:`|^|/){kind} ([a-z][a-z0-9-]*)", text, flags=re.MULTILINE):
            if command not in known:
                yield f"{path.name}: {kind} {command}"


def left_merges(path: Path, text: str) -> Iterator[str]:
    """Marks that an unfinished merge left behind."""
    for mark in re.findall(r"^(?:<{7} |={7}$|>{7} ).*$", text, flags=re.MULTILINE):
        yield f"{path.name}: {mark}"


RULES = (broken_links, missing_paths, unknown_commands, left_merges)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_documents_name_what_exists(rule: Callable[[Path, str], Iterator[str]], path: Path) -> None:
    assert list(rule(path, path.read_text(encoding="utf-8"))) == []


@pytest.mark.parametrize(
    ("rule", "text", "complaint"),
    [
        (broken_links, "see [x](nowhere.md)", "link to nowhere.md"),
        (broken_links, "# A title\n[x](#another)", "link to #another: no such heading"),
        (broken_links, "[x](configuration.md#nothing)", "no such heading"),
        (missing_paths, "in storage/nothing.py.", "storage/nothing.py"),
        (missing_paths, "```\npyflyte run workflows/none.py\n```", "workflows/none.py"),
        (missing_paths, "`examples/*.toml`", "examples/*.toml"),
        (missing_paths, "`nothing.py` does it", "nothing.py"),
        (missing_paths, "python -m benchmarks.nothing", "python -m benchmarks.nothing"),
        (unknown_commands, "run `make coffee`", "make coffee"),
        (unknown_commands, "run `make test-coffee`", "make test-coffee"),
        (unknown_commands, "```\ngleaner forget runs/a\n```", "gleaner forget"),
        (left_merges, f"one\n{'<' * 7} HEAD\ntwo", f"{'<' * 7} HEAD"),
        (left_merges, f"two\n{'=' * 7}\nthree", "=" * 7),
    ],
)
def test_the_rules_complain(rule: Callable[[Path, str], Iterator[str]], text: str, complaint: str) -> None:
    assert complaint in "; ".join(rule(GUIDE / "index.md", text))
    fine = "[a](configuration.md#run) [b](https://x.org) `storage/clock.py` `examples/*.yaml` `Makefile` `make demo`"
    assert list(rule(GUIDE / "index.md", fine)) == []


# Configuration: every field with its type, default, range, and whether it may change within a run.

NAMES: dict[typing.Any, str] = {int: "integer", float: "number", str: "text", bool: "boolean", dict: "mapping"}
# Kinds whose sections share one table; where they differ from it stands in a table behind it.
SHARED = (PoolConfig, OptimizerConfig)


def sections() -> dict[str, type]:
    """The dataclass of every section of RunConfig; of a list, that of its items."""

    def walk(kind: type, path: str) -> Iterator[tuple[str, type]]:
        for name, hint in typing.get_type_hints(kind).items():
            for inner in filter(dataclasses.is_dataclass, (hint, *typing.get_args(hint))):
                yield f"{path}{name}", inner
                yield from walk(inner, f"{path}{name}.")

    return dict(walk(RunConfig, ""))


def expected_rows(section: str, kind: type) -> dict[str, list[str]]:
    """By field: type, default, allowed values, whether it may change; as the tables must show them."""
    hints = typing.get_type_hints(kind, include_extras=True)
    # A section without an entry of its own is free with the one around it, or not at all.
    around = OPERATIONAL.get(section.split(".", maxsplit=1)[0], set())
    free = OPERATIONAL.get(section, None if around is None else set())
    # Of a kind that shares a table, that table's defaults; its own stand behind it.
    plain = {f.name: f for f in dataclasses.fields(shown_as(kind))}
    return {
        name: [kind_of, _default(plain.get(f.name, f)), allowed, "yes" if free is None or name in free else "no"]
        for name, f in zip(names(kind), dataclasses.fields(kind), strict=True)
        if f"{section}.{name}" not in sections()
        for kind_of, allowed in [_type_and_range(hints[f.name])]
    }


def _default(field: dataclasses.Field[typing.Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        return f"`{json.dumps(field.default_factory())}`"
    return "required" if field.default is dataclasses.MISSING else f"`{json.dumps(field.default)}`"


def _type_and_range(hint: typing.Any) -> tuple[str, str]:
    kind, *notes = typing.get_args(hint) if typing.get_origin(hint) is typing.Annotated else (hint,)
    if kind is type(None):
        return "null", ""
    if typing.get_origin(kind) in (typing.Union, type(int | str)):
        kinds, ranges = zip(*map(_type_and_range, typing.get_args(kind)), strict=True)
        return " or ".join(kinds), ", ".join(filter(None, ranges))
    if typing.get_origin(kind) is tuple and typing.get_origin(typing.get_args(kind)[0]) is typing.Literal:
        return "list of names", _type_and_range(typing.get_args(kind)[0])[1]
    if typing.get_origin(kind) is tuple:
        item = typing.get_args(kind)[0]
        item = typing.get_args(item)[0] if typing.get_origin(item) is typing.Annotated else item
        return f"list of {'mappings' if dataclasses.is_dataclass(item) else f'{NAMES[_plain(item)]}s'}", ", ".join(
            _bounds(notes)
        )
    if typing.get_origin(kind) is typing.Literal:
        values = [value if isinstance(value, str) else json.dumps(value) for value in typing.get_args(kind)]
        return "name", ", ".join(f"`{value}`" for value in values)
    return NAMES[_plain(kind)], ", ".join(_bounds(notes))


def _plain(kind: typing.Any) -> typing.Any:
    return typing.get_origin(kind) or kind


def _bounds(notes: list[FieldInfo]) -> Iterator[str]:
    for note in (item for info in notes for item in getattr(info, "metadata", [info])):
        if isinstance(note, annotated_types.MinLen):
            yield "not empty"
        elif getattr(note, "func", None) is quantity_text:
            yield "a Kubernetes quantity"
        for attribute, sign in (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<")):
            if hasattr(note, attribute):
                bound = getattr(note, attribute)
                is_power = isinstance(bound, int) and bound >= 1 << 20 and bound.bit_count() == 1
                yield f"{sign} {f'2^{bound.bit_length() - 1}' if is_power else f'{bound:g}'}"


def documented_rows() -> dict[str, dict[str, list[str]]]:
    """By section, and field: the cells of configuration.md between the field's name and its meaning."""
    found: dict[str, dict[str, list[str]]] = {}
    for part in re.split(r"^## ", (GUIDE / "configuration.md").read_text(encoding="utf-8"), flags=re.MULTILINE):
        title, _, body = part.partition("\n")
        rows = re.findall(r"^\| `(\w+)` \|(.*)\|[^|]*\|$", body, flags=re.MULTILINE)
        cells = {name: [cell.strip() for cell in rest.split("|")] for name, rest in rows if rest.count("|") == 3}
        for section in re.findall(r"`([\w.]+)`", title):
            found[section] = found.get(section, {}) | cells
    return found


def shown_as(kind: type) -> type:
    """Of a kind that shares a table, the kind that the table is of."""
    return next((shared for shared in SHARED if issubclass(kind, shared)), kind)


def test_every_field_stands_in_the_tables_of_the_configuration() -> None:
    kinds = sections()
    # What an evaluation has of a run's own kinds is documented with the run.
    own = [kind for section, kind in kinds.items() if not section.startswith("evaluation.")]
    kinds = {section: kind for section, kind in kinds.items() if section[:11] != "evaluation." or kind not in own}
    expected = {section: expected_rows(section, kind) for section, kind in kinds.items()}
    expected = {section: rows for section, rows in expected.items() if rows}
    assert len(expected) > 10
    assert documented_rows() == expected


def test_own_defaults_of_sections_that_share_a_table_are_documented() -> None:
    text = (GUIDE / "configuration.md").read_text(encoding="utf-8")
    sharing = {section: kind for section, kind in sections().items() if issubclass(kind, SHARED)}
    assert len(sharing) == 7
    for section, kind in sharing.items():
        plain = vars(shown_as(kind)())
        own = [(name, value) for name, value in vars(kind()).items() if name in plain and value != plain[name]]
        shown = ", ".join(f"`{name}: {json.dumps(value)}`" for name, value in own) or "none"
        assert f"| `{section}` | {shown} |" in text


def test_whole_configurations_in_the_documents_are_valid() -> None:
    bodies = [body for path in DOCUMENTS for body in blocks(path, "yaml", "whole configuration")]
    assert [parse(yaml.safe_load(body)) for body in bodies]


# Metrics and messages.
# Between them, these settings give every metric, also one that depends on a setting.
ALGORITHMS: dict[str, dict[str, typing.Any]] = {
    "plain": {"policy_loss": "tests.own_losses:clipped"},
    "ppo": {"preset": "ppo", "importance_sampling": "token", "overlong_buffer_length": 4},
    "filtered": {"filter_groups": True},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tokenizer = build_tokenizer()
    build_model(len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def report(model: Path, algorithm: str) -> ReportRecord:
    """The report of an iteration with one slot, by the production code from plan to conclusion."""
    clock = SystemClock()
    document = {
        "run": {"url": f"memory://documented-metrics-{algorithm}", "num_prompts_per_step": 1, "num_generations": 2},
        "algorithm": ALGORITHMS[algorithm],
        "policy": {"path": str(model)},
        "teacher": {"path": str(model), "top_k": 2, "pool": "scorers"} if algorithm == "plain" else None,
        "data": {"source": "arithmetic", "limit": 4},
        "rewards": [{"function": "arithmetic"}],
        "sampling": {"max_completion_length": 8},
        "rollout": {"engine": "torch", "speculation": {"drafts": "auto"}},
        "trainer": {"placement": "pod"},
        "pools": {"rollout": {"count": 1}} | ({"scoring": {"scorers": {}}} if algorithm == "plain" else {}),
    }
    reference, [[slot]] = prepare(parse(document), "test", clock)
    generate_slot(reference.run_url, 0, slot, lambda: False, clock)
    collect(reference.run_url, 0, "test", clock)
    score_iteration(reference.run_url, 0, 0, lambda: False, clock)
    train_iteration(reference.run_url, 0, "test", clock)
    return conclude_iteration(connect(reference.run_url), 0, {"rollout": 1.0, "train": 1.0}, clock)


@pytest.mark.slow
def test_every_metric_of_a_report_is_documented_and_no_other(model: Path) -> None:
    documented = re.findall(r"^\| `([\w/<>]+)` \|", (GUIDE / "metrics.md").read_text(encoding="utf-8"), re.MULTILINE)
    found = {name for algorithm in ALGORITHMS for name in report(model, algorithm).metrics} | turns_metrics().keys()
    emitted = {re.sub(r"^rewards/\w+/", "rewards/<function>/", name) for name in found}
    emitted = {re.sub(r"^lengths/\w+/", "lengths/<predictor>/", re.sub("^loss/.+", "loss/<name>", n)) for n in emitted}
    assert len(emitted) > 45
    assert sorted(documented) == sorted(emitted)


def messages(root: Path) -> list[str]:
    """All texts of the product's sources; what is filled in is a NUL."""
    texts = []
    for path in [root / "gleaner.py", *(p for folder in FOLDERS[:4] for p in (root / folder).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                texts.append(
                    "".join(
                        getattr(part, "value", "\0") if isinstance(part, ast.Constant) else "\0" for part in node.values
                    )
                )
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.append(node.value)
    return texts


def test_messages_in_the_troubleshooting_guide_are_those_of_the_code() -> None:
    quoted = [line for body in blocks(GUIDE / "troubleshooting.md", "text") for line in body.splitlines() if line]
    fragments = {part.strip() for line in quoted for part in re.split(r"<[^>]*>", line)}
    texts = messages(ROOT)
    assert len(quoted) > 20
    assert [part for part in fragments if len(part) > 3 and not any(part in text for text in texts)] == []


def test_reward_functions_in_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    columns = {"answer": "4", "ground_truth": "4", "data_source": "sums", "extra_info": {"index": 0}}
    cases = [GradingCase(number, "2+2=", text, (1, 2), columns) for number, text in enumerate(["4", "5"])]
    found = blocks(GUIDE / "data_and_rewards.md", "python")
    assert len(found) >= 2
    for number, body in enumerate(found):
        (tmp_path / f"snippet_{number}.py").write_text(body, encoding="utf-8")
        functions = [n.name for n in ast.parse(body).body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)]
        assert functions
        with Grader([RewardConfig(function=f"snippet_{number}:{name}") for name in functions]) as grader:
            graded = grader.grade(cases)
        assert [outcome.errors for outcome in graded] == [{}, {}]
        assert graded[0].reward > graded[1].reward


def test_advantage_estimators_in_the_guide_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    rewards, lengths = torch.tensor([0.0, 1.0, 1.0, 1.0], dtype=torch.float64), torch.tensor([3, 5, 2, 2])
    [body, _] = blocks(GUIDE / "algorithms.md", "python")
    (tmp_path / "guide_estimators.py").write_text(body, encoding="utf-8")
    functions = [node.name for node in ast.parse(body).body if isinstance(node, ast.FunctionDef)]
    assert functions
    for name in functions:
        algorithm = AlgorithmConfig(advantage_estimator=f"guide_estimators:{name}")
        algorithm.estimator.check()
        advantages, _ = advantages_of(rewards, lengths, 2, algorithm)
        assert advantages[0] < 0 < advantages[1]
        assert not any(advantages[2:])


def test_rows_in_the_guide_are_readable_prompts(tmp_path: Path) -> None:
    found = blocks(GUIDE / "data_and_rewards.md", "json")
    assert len(found) >= 2
    for body in found:
        (tmp_path / "rows.jsonl").write_text(body, encoding="utf-8")
        assert len(load_prompts(DataConfig(source=str(tmp_path / "rows.jsonl")))) == len(body.splitlines())


def test_price_files_in_the_guide_are_readable(tmp_path: Path) -> None:
    found = blocks(GUIDE / "forecast.md", "yaml", "price file")
    assert found
    for body in found:
        (tmp_path / "prices.yaml").write_text(body, encoding="utf-8")
        assert len(price_table(tmp_path / "prices.yaml")) > len(price_table())


def test_python_names_in_the_guide_exist() -> None:
    text = "\n".join(path.read_text(encoding="utf-8") for path in DOCUMENTS)
    for name in sorted(set(re.findall(rf"`((?:{'|'.join(FOLDERS[:4])})(?:\.\w+)+)`", text))):
        module, _, attribute = name.rpartition(".")
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            assert hasattr(importlib.import_module(module), attribute), name
