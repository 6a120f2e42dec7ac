"""A file of other runs' responses: tokens as they were sampled, with the policy's stretches learned and no others."""

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tasks.configuration.data import DataConfig
from tasks.prompts.draw import draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.prompts.run_examples import RunExample, encode, holds_run_examples
from tests.chat_tokenizers import CHATML, chat_tokenizer

SHORT = RunExample(id="0.0.1", token_ids=(7, 8), prompt="a?", columns={"level": 1}, responses=[[3, 4]], origins=[[2]])
TALK = RunExample(
    id="0.1.4-5",
    token_ids=(9,),
    prompt=[{"role": "user", "content": "b?"}],
    columns={"level": 2, "answer": "é"},
    responses=[[1, 2, 3, 4, 5, 6], [1, 2, 3, 4]],
    origins=[[2, 1, 3], [1, 1, 1, 1]],
)


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "examples.parquet"
    path.write_bytes(encode([SHORT, TALK]))
    return path


def test_tokens_text_and_columns_come_back_and_prompts_are_not_tokenised_again(file):
    data = DataConfig(source=str(file), shuffle=False)
    found = load_prompts(data, kind="dpo")
    assert [(each.id, each.text_or_messages, each.columns) for each in found] == [
        (each.id, each.prompt, each.columns) for each in (SHORT, TALK)
    ]
    assert found.columns == {"level"}
    rows = draw_prompts(
        found, chat_tokenizer(CHATML), data, first=0, count=3, context_length=64, max_completion_length=8
    )
    assert [row.token_ids for row in rows] == [(7, 8), (9,), (7, 8)]
    assert [row.prompt for row in rows] == ["a?", TALK.prompt, "a?"]


def test_the_policys_stretches_are_learned_and_an_observation_at_the_end_is_left_out(file):
    found = load_prompts(DataConfig(source=str(file)), kind="dpo")
    said = [[(each.token_ids, each.is_learned) for each in one] for one in found.completions(TALK.id, 6)]
    assert said == [
        [((1, 2), True), ((3,), False), ((4, 5, 6), True)],
        [((1,), True), ((2,), False), ((3,), True)],
    ]
    with pytest.raises(PromptError, match=r"^data\.runs, response 0\.1\.4-5 has 6 tokens; allowed: 5 "):
        found.completions(TALK.id, 5)


def test_some_examples_have_their_own_responses(file):
    found = load_prompts(DataConfig(source=str(file)), kind="dpo")
    found.completions(TALK.id, 6)
    kept = found.kept([1])
    assert [each.id for each in kept] == [TALK.id]
    assert kept.completions(TALK.id, 6) == found.completions(TALK.id, 6)


def test_equal_examples_have_equal_bytes_and_others_have_not(file):
    assert encode([SHORT, TALK]) == file.read_bytes()
    assert encode([replace(SHORT, columns={"level": 3}), TALK]) != file.read_bytes()


def test_another_file_is_none_of_these(tmp_path, file):
    other, text = tmp_path / "other.parquet", tmp_path / "text.parquet"
    pq.write_table(pa.table({"prompt": ["a"], "completion": ["b"]}), other)
    text.write_text("no Parquet")
    assert [holds_run_examples(str(each)) for each in (file, other, text, tmp_path / "none.parquet")] == [
        True,
        False,
        False,
        False,
    ]
