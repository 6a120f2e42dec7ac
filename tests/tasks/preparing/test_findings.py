"""Looks go on after the first refusal, and one refusal is raised as it is."""

import pytest

from storage.stores.store import StoreUnavailable
from tasks.preparing.findings import Findings, Refusals


def refuse(text, kind=ValueError):
    raise kind(text)


def test_what_was_seen_comes_first_and_doubts_last():
    findings = Findings()
    findings.doubt(lambda: ["it may rain"])
    findings.saw(lambda: "the sky: blue")
    assert findings.look(lambda count: count + 1, 2) == 3
    assert findings.settled() == ["the sky: blue", "not sure: it may rain"]


def test_one_refusal_is_raised_as_it_is_with_the_doubts_as_notes():
    findings = Findings()
    assert findings.look(refuse, "run.url: no answer", StoreUnavailable) is None
    findings.doubt(lambda: ["it may rain"])
    with pytest.raises(StoreUnavailable) as refused:
        findings.settled()
    assert str(refused.value) == "run.url: no answer"
    assert refused.value.__notes__ == ["not sure: it may rain"]


def test_several_refusals_are_one_line_each_in_order():
    inner = Findings()
    inner.look(refuse, "b: 2")
    inner.look(refuse, "c: 3")
    findings = Findings()
    findings.look(refuse, "a: 1", LookupError)
    findings.look(inner.settled)
    findings.doubt(refuse, "d: 4")
    with pytest.raises(Refusals) as refused:
        findings.settled()
    assert str(refused.value).splitlines() == ["a: 1", "b: 2", "c: 3", "d: 4"]


def test_the_same_refusal_of_two_looks_is_told_once():
    findings = Findings()
    findings.look(refuse, "policy.path: none")
    findings.look(refuse, "policy.path: none")
    with pytest.raises(ValueError, match=r"^policy\.path: none$"):
        findings.settled()


def test_what_no_user_can_cause_ends_everything():
    with pytest.raises(ZeroDivisionError):
        Findings().look(lambda: 1 / 0)
