"""The page as a file: what it holds, and that no text of a model or a data set can end its data."""

import base64
import hashlib
import json
import re
from collections import Counter
from html.parser import HTMLParser

import pytest

from storage.clock import ManualClock
from storage.digests import digest_of
from storage.journal.shard import Finish
from storage.records import layout, records
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.records import ClosedRecord
from tasks.viewing.page_data import page_data
from tasks.viewing.page_file import render_page, write_page
from tasks.viewing.run_reader import RunReader
from tests.committed_runs import begin, grade
from tests.journals import Incarnation, a_plan
from tests.viewed_run import CONFIG, HOSTILE, write_viewed_run
from tests.watched_run import Counted

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def reader(tmp_path_factory):
    url = str(tmp_path_factory.mktemp("file") / "run")
    return RunReader(write_viewed_run(url, tmp_path_factory.mktemp("model")))


class Scripts(HTMLParser):
    """The contents of the script elements, in order, and every tag."""

    def __init__(self, page):
        super().__init__()
        self.contents, self.tags, self._inside = [], [], False
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag == "script"
        if self._inside:
            self.contents.append("")

    def handle_endtag(self, tag):
        self._inside = False

    def handle_data(self, data):
        if self._inside:
            self.contents[-1] += data


def written(reader, path, **limits):
    done = write_page(reader, path, ManualClock(), **limits)
    data, script = Scripts(path.read_text(encoding="utf-8")).contents
    return done, json.loads(data), script


def test_the_file_answers_what_the_server_would(reader, tmp_path):
    done, data, _ = written(reader, tmp_path / "run.html")
    assert (done.responses, done.iterations) == (12, (0, 1, 2))
    assert done.num_bytes == (tmp_path / "run.html").stat().st_size
    paths = ["iterations/0", "advantages/0", "advantages/2", "responses/0/0", "tokens/0/0/0", "prompts/p0"]
    for path in paths:
        assert data["answers"][path] == json.loads(json.dumps(page_data(reader, ManualClock(), path))), path
    assert data["summary"]["planned"] == [2]


def test_no_text_ends_the_data_or_makes_an_element(reader, tmp_path):
    _, data, script = written(reader, tmp_path / "run.html")
    assert HOSTILE in json.dumps(data["answers"]["iterations/2"])
    page = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert HOSTILE not in page
    tags = [tag for tag, _ in Scripts(page).tags]
    assert "img" not in tags
    assert tags.count("script") == 2
    assert not [
        value for _, attributes in Scripts(page).tags for value in attributes.values() if "http" in (value or "")
    ]
    assert not re.search(r"innerHTML|outerHTML|document\.write|\beval\b|insertAdjacent", script)


def test_the_policy_lets_the_page_run_its_own_script_alone(reader, tmp_path):
    _, _, script = written(reader, tmp_path / "run.html")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    [policy] = [
        attributes["content"]
        for tag, attributes in Scripts((tmp_path / "run.html").read_text(encoding="utf-8")).tags
        if attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    assert f"script-src 'sha256-{digest}';" in policy
    assert "default-src 'none'" in policy
    assert "connect-src 'none'" in policy
    assert "connect-src 'self'" in render_page(data_summary(reader))


def data_summary(reader):
    return page_data(reader, ManualClock(), "summary")


@pytest.mark.parametrize(
    ("limits", "responses", "iterations"),
    [
        ({"responses_max": 7}, 6, (1, 2)),
        ({"responses_max": 4}, 4, (2,)),
        ({"tokens_max": 12}, 4, (2,)),
        ({"responses_max": 1}, 0, ()),
    ],
)
def test_a_file_holds_whole_groups_of_the_newest_iterations(reader, tmp_path, limits, responses, iterations):
    done, data, _ = written(reader, tmp_path / "run.html", **limits)
    assert (done.responses, done.iterations) == (responses, iterations)
    assert len(data["summary"]["iterations"]) == 2


@pytest.mark.parametrize("groups", [2, 6])
def test_each_shard_is_read_for_the_index_and_the_texts_however_many_responses_there_are(tmp_path, groups):
    """Of an iteration that is closed, the index reads none; of one under way, it reads each of them."""
    store = Counted()
    begin(store, config=CONFIG)
    plans = []
    for iteration in range(2):
        prompts = encode_prompts([PromptRow(f"p{group}", (1, 2), "1+1=", {}) for group in range(groups)])
        key = layout.prompts(iteration, digest_of(prompts))
        store.put(key, prompts)
        plan = a_plan(groups=groups, generations=2, slots=1, iteration=iteration, prompts_key=key, config=CONFIG)
        records.commit(store, layout.plan(iteration), plan)
        plans.append(plan)
        member = Incarnation(store, plan, 0, f"00000-{'a' * 16}")
        for response in range(2 * groups):
            member.write(response, [5] * (response + 1), Finish.STOP)
        member.announce(started_at_s=1, updated_at_s=2, tokens_generated=1, gone=True)
    grade(store, plans[0], 0, tuple(range(2 * groups)))
    records.commit(store, layout.closed(0), ClosedRecord(iteration=0, reason="all recorded"))
    store.asked.clear()
    done = write_page(RunReader(store), tmp_path / "run.html", ManualClock())
    assert (done.responses, done.iterations) == (4 * groups, (0, 1))
    asked = Counter(store.asked)
    for iteration, times in ((0, 1), (1, 2)):
        shards = [key for key in store.list(layout.journal(iteration)) if key.endswith(".arrow")]
        assert len(shards) == 2 * groups
        assert {asked[key] for key in shards} == {times}
    # Nothing else is asked for once for each response, either.
    others = {key: count for key, count in asked.items() if "/journal/" not in key}
    assert max(others.values()) < 8, others


def test_a_file_that_cannot_be_is_refused_before_anything_is_read(reader, tmp_path):
    with pytest.raises(IsADirectoryError, match="is a folder; allowed: the name of a file"):
        write_page(reader, tmp_path, ManualClock())
    with pytest.raises(FileNotFoundError, match="nowhere does not exist; allowed: a file in a folder that exists"):
        write_page(reader, tmp_path / "nowhere" / "run.html", ManualClock())
