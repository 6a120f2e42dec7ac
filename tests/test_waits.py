"""The page of all waits has each place in the code that waits, and no other."""

import re

import pytest

from tests.waiting_places import ROOT, WaitingPlace, places_in, waiting_places

PAGE = ROOT / "docs" / "waits.md"
PLACE = re.compile(r"`([\w/]+\.py:[\w.<>]+)`")


def test_the_page_has_every_wait_of_the_product_once():
    told = PLACE.findall(PAGE.read_text(encoding="utf-8"))
    found = [each.place for each in waiting_places()]
    assert sorted(set(found) - set(told)) == [], "these wait, and docs/waits.md does not say what for and how long"
    assert sorted(set(told) - set(found)) == [], "docs/waits.md names these, and they wait no longer"
    assert len(told) == len(set(told))


def test_every_wait_for_others_says_how_long_it_takes_at_most():
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("|") and ".py:" in line]
    assert len(rows) > 40
    for row in rows:
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert all(cells), row


@pytest.mark.parametrize(
    ("line", "bare"),
    [
        ("thread.join()", True),
        ("self._thread.join(END_TIME_LIMIT_S)", False),
        ("thread.join(max(0.0, end_s - now_s))", False),
        ("time.sleep(1)", False),
        ("sleep(pause_s)", False),
        ("ended.wait()", True),
        ("ended.wait(5)", False),
        ("inbox.get()", True),
        ("future.result()", True),
        ("connection.recv(4)", False),
        ("listener.accept()", True),
        ("select.select([a], [], [])", False),
        ("os.waitpid(-1, 0)", False),
        ("process.communicate()", True),
        ("fcntl.flock(file, fcntl.LOCK_EX)", False),
        ("await asyncio.wait({task})", False),
        ("clock.sleep(POLL_INTERVAL_S)", False),
        ("waiting.pause(1.0)", False),
        ("lock.acquire()", True),
    ],
)
def test_a_call_that_waits_is_found_wherever_it_stands(line, bare):
    source = (
        f"class A:\n    async def f(self):\n        def inner():\n            x = [{line.removeprefix('await ')}]\n"
    )
    assert places_in(source, "a.py") == {WaitingPlace("a.py:A.f", bare)}
    assert places_in(f"if True:\n    {line.removeprefix('await ')}\n", "a.py") == {WaitingPlace("a.py:<module>", bare)}


@pytest.mark.parametrize(
    "line", ['", ".join(names)', "os.path.join(a, b)", 'mapping.get("key")', "Path('a').joinpath()", "queue.put(1)"]
)
def test_what_only_looks_like_a_wait_is_none(line):
    assert places_in(f"def f():\n    {line}\n", "a.py") == set()
