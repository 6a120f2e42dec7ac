"""The command `gleaner show`."""

import json
from dataclasses import replace

import pytest
from click.testing import CliRunner

from gleaner import main
from storage.records import layout, records
from storage.records.gradings import GradedRecord, GradingRecord
from storage.records.records import PlanRecord
from storage.stores.connect import connect
from tests.committed_runs import run_of
from tests.viewed_run import CONFIG, write_viewed_run

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The url of a run: iteration 0 is compacted, 1 is committed, 2 is under way; it holds a tokenizer."""
    return write_viewed_run(str(tmp_path_factory.mktemp("show") / "run"), tmp_path_factory.mktemp("model")).url


def gleaner(*arguments):
    return CliRunner().invoke(main, ["show", *map(str, arguments)])


@pytest.mark.parametrize("iteration", [0, 1])
def test_a_response_is_shown_with_its_kill_and_its_rewards(run, iteration):
    result = gleaner(run, iteration, 0)
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[0].startswith(f"iteration {iteration}, response 0 (sample 0 of group 0), prompt p0: 5 tokens, trained")
    assert lines[1].startswith("reward 0 (exact 0, style not applicable)   advantage -0.7")
    stretches = [line for line in lines if line.startswith("[")]
    assert stretches[0] == f"[0 to 3, slot 0, 00000-{'a' * 16}: killed at token 3]"
    assert stretches[1] == f"[3 to 5, slot 0, 00000-{'b' * 16}: stop]"
    assert any(line.split()[:3] == ["0", "*", "0"] for line in lines)
    assert any(line.split()[:3] == ["1", "0.25", "3"] for line in lines)


def test_a_response_that_goes_on_is_shown_as_far_as_it_is(run):
    result = gleaner(run, 2, 0)
    assert "3 tokens, running" in result.stdout
    assert "not graded" in result.stdout
    assert gleaner(run, 2, 0, "--json").exit_code == 0


def test_everything_is_one_json_object(run):
    found = json.loads(gleaner(run, 0, 3, "--json").stdout)
    assert (found["response"], found["group"], found["sample"], found["reward"]) == (3, 1, 1, 0.75)
    assert found["rewards"] == {"exact": 0.75, "style": 0.5}
    assert found["columns"] == {"answer": "4", "level": [1, None]}
    assert [stretch["end"] for stretch in found["stretches"]] == ["length"]


def test_the_tokens_are_listed_with_their_log_probs(run):
    lines = gleaner(run, 0, 0, "--tokens").stdout.splitlines()
    assert [line.split()[:2] for line in lines] == [[str(position), "-1.5000"] for position in range(5)]
    listed = json.loads(gleaner(run, 0, 0, "--tokens", "--json").stdout)
    assert [token["logprob"] for token in listed] == [-1.5] * 5
    whole = json.loads(gleaner(run, 0, 0, "--json").stdout)
    assert "".join(token["text"] for token in listed) == "".join(stretch["text"] for stretch in whole["stretches"])


@pytest.mark.parametrize(
    ("numbers", "message"),
    [
        ((7, 0), "iteration: value 7; "),
        ((0, 4), "response: value 4; allowed: 0 to 3"),
    ],
)
def test_numbers_that_the_run_does_not_have_are_refused_in_one_line(run, numbers, message):
    result = gleaner(run, *numbers)
    assert (result.exit_code, result.stdout) == (1, "")
    [line] = result.stderr.splitlines()
    assert message in line


def test_a_directory_without_a_run_is_refused(tmp_path):
    result = gleaner(tmp_path, 0, 0)
    assert result.exit_code == 1
    assert result.stderr.splitlines() == [f"gleaner: {tmp_path} holds no run"]


def test_without_a_tokenizer_the_token_ids_can_be_listed(tmp_path):
    store = connect(str(tmp_path / "run"))
    run_of(store, 1)
    records.put(store, layout.plan(0), replace(records.read(store, PlanRecord, layout.plan(0)), config=CONFIG))
    shown = gleaner(tmp_path / "run", 0, 2)
    assert "(no tokenizer: gleaner show --tokens lists the token ids)" in shown.stdout
    assert "user: 2+2=" in shown.stdout
    lines = gleaner(tmp_path / "run", 0, 2, "--tokens").stdout.splitlines()
    assert [line.split("'")[1].strip() for line in lines] == ["5", "5", "70000", "2"]


def test_a_response_is_shown_with_its_reward_by_each_grading(tmp_path, caplog):
    (tmp_path / "model").mkdir()
    store = write_viewed_run(str(tmp_path / "run"), tmp_path / "model")
    record = GradedRecord(
        iteration=1, responses=(1, 3), reward=(0.25, -2.0), rewards={"x": (0.5, None)}, reward_errors=(), given_up=()
    )
    for name in ("rubric", "second"):
        records.commit(store, layout.grading(name), GradingRecord(rewards=({"name": "x"},)))
        records.commit(store, layout.graded(name, 1), record)
    assert "   by grading rubric -2   by grading second -2\n" in gleaner(store.url, 1, 3).stdout
    assert json.loads(gleaner(store.url, 1, 1, "--json").stdout)["gradings"] == {"rubric": 0.25, "second": 0.25}
    store.put(layout.graded("rubric", 1), b"damaged")
    assert json.loads(gleaner(store.url, 1, 1, "--json").stdout)["gradings"] == {"second": 0.25}
    assert "left out: object 'gradings/rubric/000001.json' is corrupt" in caplog.text
    for iteration, response in ((1, 2), (0, 3)):
        assert json.loads(gleaner(store.url, iteration, response, "--json").stdout)["gradings"] == {}
