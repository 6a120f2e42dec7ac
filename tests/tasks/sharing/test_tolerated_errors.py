import logging

import pytest

from storage.stores.store import StoreDenied, StoreUnavailable
from tasks.sharing.tolerated_errors import ToleratedErrors


def test_a_trouble_is_logged_when_it_begins_changes_and_is_over(caplog):
    errors = ToleratedErrors()
    with caplog.at_level(logging.WARNING):
        for error in (StoreDenied("a"), StoreDenied("b"), StoreUnavailable("c"), None, None, StoreDenied("d")):
            with errors.tolerated("run x"):
                if error is not None:
                    raise error
    messages = [record.getMessage() for record in caplog.records]
    assert messages == [
        "run x: StoreDenied: a; going on",
        "run x: StoreUnavailable: c; going on",
        "run x: works again",
        "run x: StoreDenied: d; going on",
    ]


def test_the_troubles_of_two_runs_are_apart(caplog):
    errors = ToleratedErrors()
    with caplog.at_level(logging.WARNING):
        for run in ("x", "y", "x", "y"):
            with errors.tolerated(run):
                raise StoreDenied("403")
    assert len(caplog.records) == 2


@pytest.mark.parametrize("error", [KeyError("a bug"), AssertionError("a bug"), TypeError("a bug")])
def test_an_error_of_the_program_is_not_gone_on_after(error):
    with pytest.raises(type(error)), ToleratedErrors().tolerated("x"):
        raise error


def test_an_attempt_tells_whether_it_failed():
    errors = ToleratedErrors()
    with errors.tolerated("run x") as bad:
        raise StoreDenied("403")
    with errors.tolerated("run x") as good:
        pass
    assert (bad.failed, good.failed) == (True, False)
