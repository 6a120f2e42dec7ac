"""Rollouts as Parquet, from compacted and from live iterations, with and without a tokenizer."""

import json
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from examples.warm_start import build_tokenizer
from storage.digests import digest_of
from storage.journal.compaction import compact
from storage.journal.retention import settle
from storage.records import layout, records
from storage.records.gradings import GradedRecord, GradingRecord
from storage.records.prompt_table import PromptRow, encode_prompts
from storage.records.run import read_plan
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tasks.reporting.export import export_rollouts, parse_range
from tests.committed_runs import PROMPTS, TOKENS, begin, grade, plan_iteration, roll_out, run_of
from tests.journals import LOGPROB
from tests.turn_journals import PLAN, journalled


@pytest.fixture(scope="module")
def tokenizer_files(tmp_path_factory):
    directory = tmp_path_factory.mktemp("model")
    build_tokenizer().save_pretrained(directory)
    (directory / "config.json").write_text('{"model_type": "qwen2"}')
    return directory


@pytest.fixture
def store(tokenizer_files):
    """Iterations 0 and 1 are committed, 0 of them compacted; 2 is under way."""
    found = MemoryStore("export")
    run_of(found, 2)
    begin(found, {path.name: path.read_bytes() for path in tokenizer_files.iterdir()})
    settle(found, 0)
    plan = plan_iteration(found, 2)
    roll_out(found, plan, responses=(1, 2, 3))
    grade(found, plan, 0, (2, 3))
    return found


def test_the_parts_of_an_iteration_make_one_file(store, tmp_path):
    [whole] = export_rollouts(store, "1", tmp_path / "journal")
    compact(store, 1, part_tokens=5)
    assert len(store.list(layout.responses_parts(1))) == 3
    [by_parts] = export_rollouts(store, "1", tmp_path / "parts")
    assert by_parts.responses == whole.responses == 4
    assert pq.ParquetFile(by_parts.path).num_row_groups == 3
    assert pq.read_table(by_parts.path).equals(pq.read_table(whole.path))


def test_every_column_of_a_committed_iteration(store, tmp_path):
    for iteration in (0, 1):  # compacted, and from the journal
        [written] = export_rollouts(store, str(iteration), tmp_path / "out")
        assert (written.path.name, written.responses, written.planned) == (f"iteration-00000{iteration}.parquet", 4, 4)
        table = pq.read_table(written.path).to_pydict()
        assert table["iteration"] == table["weight_version"] == [iteration] * 4
        assert table["response"] == [0, 1, 2, 3]
        assert table["group"] == [0, 0, 1, 1]
        assert table["prompt_id"] == ["p0", "p0", "p1", "p1"]
        assert table["prompt"][0] == PROMPTS[0].prompt
        assert json.loads(table["prompt"][2]) == PROMPTS[1].prompt
        assert json.loads(table["columns"][3]) == PROMPTS[1].columns
        assert table["token_ids"] == [TOKENS[response] for response in range(4)]
        assert table["logprobs"] == [[LOGPROB] * len(TOKENS[response]) for response in range(4)]
        assert table["length"] == [len(TOKENS[response]) for response in range(4)]
        assert table["finish_reason"] == ["stop", "stop", "stop", "length"]
        assert table["reward"] == [0.0, 0.25, 0.5, 0.75]
        assert table["reward_exact"] == [0.0, 0.25, 0.5, 0.75]
        assert table["reward_style"] == [None, 0.5, 0.5, 0.5]


def store_grading(store, *iterations):
    """The grading `rubric` of the four responses of each of these iterations: the rewards n + the response's number."""
    records.commit(store, layout.grading("rubric"), GradingRecord(rewards=({"name": "new"},)))
    for iteration in iterations:
        values = tuple(float(iteration + number) for number in range(4))
        record = GradedRecord(
            iteration=iteration,
            responses=(0, 1, 2, 3),
            reward=values,
            rewards={"new": values, "any": (None, 0.5, None, 0.5)},
            reward_errors=(),
            given_up=(),
        )
        records.commit(store, layout.graded("rubric", iteration), record)


def test_the_rewards_of_a_grading_stand_where_the_recorded_ones_do(store, tmp_path):
    store_grading(store, 0, 1)
    compact(store, 1, part_tokens=5)  # several parts
    plain = export_rollouts(store, "0:2", tmp_path / "plain")
    graded = export_rollouts(store, ":", tmp_path / "graded", grading="rubric")
    assert [each.iteration for each in graded] == [0, 1]  # the third is not committed
    for own, other in zip(plain, graded, strict=True):
        before, after = (pq.read_table(each.path) for each in (own, other))
        assert after["reward"].to_pylist() == [own.iteration + number for number in (0.0, 1.0, 2.0, 3.0)]
        assert after["reward_any"].to_pylist() == [None, 0.5, None, 0.5]
        assert after["reward_new"].to_pylist() == after["reward"].to_pylist()
        rest = [name for name in before.column_names if not name.startswith("reward")]
        assert [name for name in after.column_names if not name.startswith("reward")] == rest
        assert after.select(rest).equals(before.select(rest))
        at = before.column_names.index("reward")
        assert after.column_names[at : at + 3] == ["reward", "reward_any", "reward_new"]
        assert before["reward"].to_pylist() != after["reward"].to_pylist()


def test_a_grading_that_lacks_an_iteration_is_refused_before_anything_is_written(store, tmp_path):
    with pytest.raises(LookupError, match=r"^grading: value 'rubric'; allowed: none, as `gleaner regrade` has graded"):
        export_rollouts(store, ":", tmp_path / "out", grading="rubric")
    store_grading(store, 0)
    for iterations in (":", "1"):
        with pytest.raises(LookupError, match=r"^grading 'rubric' has no iteration 1; `gleaner regrade` adds it$"):
            export_rollouts(store, iterations, tmp_path / "out", grading="rubric")
    with pytest.raises(LookupError, match=r"^grading: value 'other'; allowed: rubric$"):
        export_rollouts(store, "0", tmp_path / "out", grading="other")
    with pytest.raises(ValueError, match=r"^iterations: value '2'; allowed: the run has 0 to 1$"):
        export_rollouts(store, "2", tmp_path / "out", grading="rubric")
    assert not (tmp_path / "out").exists()
    assert [each.iteration for each in export_rollouts(store, "0", tmp_path / "out", grading="rubric")] == [0]


def test_lists_are_plain_parquet(store, tmp_path):
    [written] = export_rollouts(store, "0", tmp_path)
    schema = pq.read_schema(written.path)
    assert schema.field("token_ids").type == pa.list_(pa.field("element", pa.int32()))
    assert schema.field("logprobs").type == pa.list_(pa.field("element", pa.float32()))
    assert schema.metadata is None


def test_the_completion_is_the_text_that_the_rewards_saw(store, tmp_path):
    tokenizer = build_tokenizer()
    [written] = export_rollouts(store, "0", tmp_path)
    completions = pq.read_table(written.path).column("completion").to_pylist()
    for response in (0, 1, 3):
        assert completions[response] == tokenizer.decode(TOKENS[response], skip_special_tokens=True)
    assert len(completions[1]) == 0  # <bos> <bos> <eos>
    assert len(completions[0]) == 4


@pytest.mark.parametrize("damage", ["missing", "broken"])
def test_without_a_tokenizer_there_is_everything_but_text(store, tmp_path, caplog, damage):
    begin(store, {"tokenizer.json": b"{"} if damage == "broken" else {})
    [written] = export_rollouts(store, "0", tmp_path)
    table = pq.read_table(written.path)
    assert table.column("completion").to_pylist() == [None] * 4
    assert table.schema.field("completion").type == pa.string()
    assert "column completion is empty: no tokenizer in memory://export/model/" in caplog.text


@pytest.mark.parametrize("key", [layout.model_file("tokenizer.json"), "prompts"])
def test_exchanged_objects_are_refused_by_name(store, tmp_path, key):
    key = read_plan(store, 0).prompts_key if key == "prompts" else key
    exchanged = encode_prompts(PROMPTS[::-1]) if "prompts" in key else store.get(key).replace(b": 1", b": 2")
    assert store.get(key) != exchanged
    store.put(key, exchanged)
    with pytest.raises(CorruptObject) as caught:
        export_rollouts(store, "0", tmp_path / "out")
    assert caught.value.key == key


def test_an_iteration_under_way_gives_what_is_finished_and_graded(store, tmp_path):
    files = export_rollouts(store, ":", tmp_path)
    assert [(file.iteration, file.responses) for file in files] == [(0, 4), (1, 4), (2, 3)]
    table = pq.read_table(files[2].path).to_pydict()
    assert table["response"] == [1, 2, 3]
    assert table["reward"] == [None, 0.5, 0.75]


def test_a_whole_run_reads_as_one_table(store, tmp_path):
    export_rollouts(store, ":", tmp_path)
    assert pq.read_table(tmp_path).num_rows == 11


def test_nothing_is_overwritten_unless_asked_for(store, tmp_path):
    (tmp_path / "iteration-000001.parquet").write_bytes(b"mine")
    with pytest.raises(FileExistsError, match=r"iteration-000001.parquet exists already; allowed: another folder, or"):
        export_rollouts(store, ":", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000001.parquet"]
    assert len(export_rollouts(store, "0:1", tmp_path)) == 1
    assert len(export_rollouts(store, ":", tmp_path, overwrite=True)) == 3
    assert pq.read_table(tmp_path / "iteration-000001.parquet").num_rows == 4


def test_what_another_export_is_writing_is_left_alone(store, tmp_path):
    other = tmp_path / ".iteration-000000.parquet.unfinished"
    other.write_bytes(b"half of")
    export_rollouts(store, "0", tmp_path)
    assert other.read_bytes() == b"half of"
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "iteration-000000.parquet"]


def test_a_file_that_cannot_be_completed_leaves_nothing(store, tmp_path):
    (tmp_path / "iteration-000000.parquet").mkdir()
    with pytest.raises(IsADirectoryError):
        export_rollouts(store, "0", tmp_path, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["iteration-000000.parquet"]


def test_a_run_without_an_iteration(tmp_path):
    with pytest.raises(LookupError, match="memory://empty holds no iteration"):
        export_rollouts(MemoryStore("empty"), ":", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("text", "chosen"), [(":", [0, 1, 2]), ("1:", [1, 2]), (":2", [0, 1]), ("1:2", [1]), ("2", [2]), ("0:3", [0, 1, 2])]
)
def test_ranges_leave_out_their_end(text, chosen):
    assert list(parse_range(text, 3)) == chosen


@pytest.mark.parametrize("text", ["", "a", "1-2", "-1", "3", "2:4", "2:2", "2:1", "1:2:3", "5:", "9" * 5000])
def test_other_ranges_are_refused(text):
    with pytest.raises(ValueError, match=f"iterations: value '{text}'; allowed: "):
        parse_range(text, 3)


def test_the_pandas_example_of_the_guide_runs(store, tmp_path, monkeypatch, capsys):
    guide = Path(__file__).parents[3] / "docs" / "guide" / "export.md"
    text = guide.read_text(encoding="utf-8")
    example, *_ = re.findall(r"^```python\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    export_rollouts(store, ":", tmp_path / "rollouts")
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "example.py"
    script.write_text(example)
    runpy.run_path(str(script))
    shown = capsys.readouterr().out
    assert "groups without a signal" in shown
    assert "1+1=" in shown


def test_a_conversation_is_exported_as_its_stretches_and_as_messages(tokenizer_files, tmp_path):
    """Of the journal in tests/turn_journals.py: two turns; one that began again; one whose environment was lost."""
    store, prompts = MemoryStore("turns"), encode_prompts([PromptRow("p", (1, 2), "look", {})])
    plan = replace(PLAN, prompts_key=layout.prompts(0, digest_of(prompts)))
    store.put(plan.prompts_key, prompts)
    records.commit(store, layout.plan(0), plan)
    journalled(store)
    begin(store, {path.name: path.read_bytes() for path in tokenizer_files.iterdir()})
    [written] = export_rollouts(store, "0", tmp_path)
    table = pq.read_table(written.path).to_pydict()
    assert table["finish_reason"] == ["stop", "length", "failed"]
    assert table["origins"] == [[2, 3, 2], [1], [2]]
    assert table["length"] == [7, 1, 2]
    # The policy's, in order: an observation has none.
    assert [len(each) for each in table["logprobs"]] == [4, 1, 2]
    decode = build_tokenizer().decode
    first = json.loads(table["messages"][0])
    assert [message["role"] for message in first] == ["assistant", "tool", "tool", "assistant"]
    assert first[0]["content"] == decode([5, 6], skip_special_tokens=True)
    assert first[1] == {"role": "tool", "name": "look", "content": "8"}
    assert first[2]["content"] == "error"
    # What stood before it began again is not its conversation.
    assert len([m for m in json.loads(table["messages"][1]) if m["role"] == "assistant"]) == 1
