"""Each exception class of the product is in the tree below GleanerError, or is a named signal that no user sees."""

import ast
import builtins
import importlib
import re
from functools import cache

import pytest

from storage.errors import GleanerError, UserCodeError, WrongInputError
from storage.stores.store import CorruptObject, ObjectMissing, StorageError
from tasks.learning.journal_follower import GroupTimeout
from tasks.preparing.findings import EXPECTED, Findings
from tests.architecture import ROOT, Tree

APART = "in a package that must not import storage"
CAUGHT = "caught by its own module or by the caller's, which goes on or raises an error of the tree"
CHILD = "between a process and the process of a user's code; a message in a record or in an error of the tree"
SIGNALS = {
    "DocumentError": APART,
    "MachineTooSmall": APART,
    "OtherCode": APART,
    "ModelConfigError": APART,
    "PricesError": APART,
    "UnknownMachine": APART,
    "TraceError": APART,
    "TooFewPlacesError": APART,
    "TooManyIterationsError": APART,
    "NotReadable": "what the doctor cannot see of a cluster: a line of its findings",
    "NoAnswer": "what the doctor cannot see of a cluster: a line of its findings",
    "PeerGone": CHILD,
    "CallFailed": CHILD,
    "CallHung": CHILD,
    "ProcessEnded": CHILD,
    "ProcessSpoiled": CHILD,
    "OutOfTime": CHILD,
    "_Refused": CHILD,
    "ProcessLost": CHILD,
    "Stuck": CHILD,
    "TimedOut": CHILD,
    "NotBegun": CHILD,
    "Failed": CHILD,
    "EnvironmentLost": "the environment begins again, or the response ends as failed",
    "Refusal": "the answer of the HTTP server to a program of the user's",
    "Crashed": "planted by tests and simulation: a process that no longer exists",
    "AnswerError": CAUGHT,
    "AnswerNotBelieved": CAUGHT,
    "NoLiteral": CAUGHT,
    "NoReading": CAUGHT,
    "_TooLargeError": CAUGHT,
    "WrongAnswer": CAUGHT,
    "_KeyTwiceError": CAUGHT,
    "RecordedElsewhereError": "another attempt of the trainer was first; this one goes on from there",
    "AnotherWasFirstError": "another attempt of the trainer was first; this one goes on from there",
    "LeftAlone": "the trainer's machines begin to generate",
    "WaitIsUseless": "a member ends without having waited longer",
    "_NotNeededError": "a member leaves, and gives a pull of weights up",
    "Preempted": "a notice came; the member ends, and others take over",
    "NoLongerDue": "the host's trainer goes on with what is due now",
    "OtherDevice": "the host's trainer ends, and a new process takes over",
}


@cache
def exceptions() -> dict[str, tuple[str, set[str]]]:
    """Module and all bases, by class: of the product's exception classes, read from the sources without importing."""
    classes = {
        node.name: (source.name, [ast.unparse(base).rpartition(".")[2] for base in node.bases])
        for source in Tree(ROOT).product()
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    }

    def bases(name: str) -> set[str]:
        found = getattr(builtins, name, None)
        if isinstance(found, type):
            return {each.__name__ for each in found.__mro__}
        return {name}.union(*map(bases, classes[name][1] if name in classes else ()))

    ancestry = {name: (module, bases(name)) for name, (module, _) in classes.items()}
    return {name: found for name, found in ancestry.items() if "BaseException" in found[1]}


def test_each_exception_class_is_in_the_tree_or_a_named_signal() -> None:
    outside = {name for name, (_, bases) in exceptions().items() if "GleanerError" not in bases}
    assert outside == set(SIGNALS)
    assert len(exceptions()) - len(outside) > 45


def test_packages_apart_are_those_that_must_not_import_storage() -> None:
    packages = {name: module.partition(".")[0] for name, (module, _) in exceptions().items()}
    apart = {name for name, reason in SIGNALS.items() if reason == APART}
    assert {packages[name] for name in apart} == {"resources", "workflows"}
    # Two are no wrong input: a user catches ValueError for each other one.
    assert {name for name in apart if "ValueError" not in exceptions()[name][1]} == {"MachineTooSmall", "OtherCode"}


def test_the_branches_do_not_overlap() -> None:
    branches = {"WrongInputError", "StorageError", "EngineError", "UserCodeError"}
    for name, (_, bases) in exceptions().items():
        assert len(branches & bases) <= 1, name


def section() -> str:
    return (ROOT / "docs/guide/troubleshooting.md").read_text(encoding="utf-8").partition("\n## Errors\n")[2]


def test_the_guide_names_the_branches_where_they_are_and_classes_below_them() -> None:
    rows = [line.split("|")[1:5] for line in section().splitlines() if line.startswith("| `")]
    branches = [re.findall(r"`(\w+)`", row[0])[0] for row in rows]
    assert branches == ["GleanerError", "WrongInputError", "StorageError", "EngineError", "UserCodeError"]
    for branch, (_, where, _, below) in zip(branches, rows, strict=True):
        module = re.findall(r"`([\w.]+)`", where)[0]
        assert issubclass(getattr(importlib.import_module(module), branch), GleanerError)
        for name in re.findall(r"`(\w+)`", below):
            assert branch in exceptions()[name][1], name


def test_the_guide_and_the_docstring_catch_what_the_command_line_catches() -> None:
    [caught] = re.findall(r"^except \((.*)\) as error:$", section(), flags=re.MULTILINE)
    assert [name.rpartition(".")[2] for name in caught.split(", ")] == [each.__name__ for each in EXPECTED]
    text = ast.get_docstring(ast.parse((ROOT / "storage/errors.py").read_text(encoding="utf-8"))) or ""
    for name in re.findall(r"\b[A-Z]\w+(?:Error|Lost|Timeout|Gradient|Failed|Preempted)\b", text):
        assert name in exceptions() or hasattr(builtins, name), name


@pytest.mark.parametrize(
    ("error", "kinds"),
    [
        (WrongInputError("x"), (GleanerError, ValueError)),
        (UserCodeError("x"), (GleanerError,)),
        (ObjectMissing("a/b"), (StorageError, LookupError)),
        (GroupTimeout("x"), (GleanerError, TimeoutError, OSError)),
    ],
)
def test_errors_keep_their_classes_and_their_message(error: Exception, kinds: tuple[type[Exception], ...]) -> None:
    assert all(isinstance(error, kind) for kind in kinds)
    assert str(error) in ("x", "no object 'a/b'")


def test_a_look_is_refused_by_any_error_of_the_tree() -> None:
    findings = Findings()
    for error in (GroupTimeout("late"), CorruptObject("a", "torn"), UserCodeError("no function")):

        def look(error: Exception = error) -> None:
            raise error

        findings.look(look)
    assert [str(each) for each in findings.refusals] == ["late", "object 'a' is corrupt: torn", "no function"]
