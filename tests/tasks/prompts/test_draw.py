from collections.abc import Mapping
from typing import Any

import pytest

from tasks.configuration.data import DataConfig
from tasks.prompts.draw import draw_prompts
from tasks.prompts.loading import load_prompts
from tasks.prompts.order import prompt_index
from tasks.prompts.prompt import PromptError

DATA = DataConfig(source="arithmetic", limit=7, seed=4)


class Letters:
    """One token per character."""

    def __call__(self, text: str) -> Mapping[str, Any]:
        return {"input_ids": [ord(letter) for letter in text]}

    def apply_chat_template(self, conversation: list[dict[str, Any]], **_how: Any) -> Any:
        return [ord(letter) for message in conversation for letter in message["content"]]


def draw(first: int, count: int, data: DataConfig = DATA, context_length: int = 100, completion: int = 10) -> Any:
    return draw_prompts(
        load_prompts(data),
        Letters(),
        data,
        first=first,
        count=count,
        context_length=context_length,
        max_completion_length=completion,
    )


def test_rows_are_the_prompts_at_these_positions_with_all_that_rewards_need():
    prompts = load_prompts(DATA)
    for position, row in enumerate(draw(0, 7)):
        prompt = prompts[prompt_index(position, 7, DATA.seed, DATA.shuffle)[1]]
        assert (row.prompt_id, row.prompt, row.columns) == (prompt.id, prompt.text_or_messages, prompt.columns)
        assert row.token_ids == tuple(ord(letter) for letter in prompt.text_or_messages)


@pytest.mark.parametrize("size", [1, 3, 7, 10])
def test_steps_in_a_row_are_one_long_draw(size):
    steps = [row for first in range(0, 20, size) for row in draw(first, size)]
    assert steps[:20] == draw(0, 20)


def test_an_epoch_holds_every_prompt_once_and_the_next_is_in_another_order():
    first, second = draw(0, 7), draw(7, 7)
    assert {row.prompt_id for row in first} == {row.prompt_id for row in second} == {str(k) for k in range(7)}
    assert first != second


def test_without_shuffling_the_order_is_that_of_the_source():
    rows = draw(5, 4, DataConfig(source="arithmetic", limit=7, shuffle=False))
    assert [row.prompt_id for row in rows] == ["5", "6", "0", "1"]


def test_chat_messages_are_kept_as_they_are(tmp_path):
    (tmp_path / "chat.jsonl").write_text('{"prompt": [{"role": "user", "content": "hi"}], "answer": 3}\n')
    [row] = draw(0, 1, DataConfig(source=str(tmp_path / "chat.jsonl")))
    assert (row.prompt, row.columns) == ([{"role": "user", "content": "hi"}], {"answer": 3})
    assert row.token_ids == (104, 105)


def test_one_prompt_that_does_not_fit_refuses_the_draw_by_its_name(tmp_path):
    (tmp_path / "long.jsonl").write_text('{"prompt": "short", "id": "a"}\n{"prompt": "much longer", "id": "b"}\n')
    data = DataConfig(source=str(tmp_path / "long.jsonl"))
    assert len(draw(0, 2, data, context_length=21)) == 2
    with pytest.raises(PromptError, match=r"prompt '1' has 11 tokens; allowed: 10 \(rollout.context_length 20 less"):
        draw(0, 2, data, context_length=20)
    limited = DataConfig(source=str(tmp_path / "long.jsonl"), max_prompt_length=10)
    with pytest.raises(PromptError, match=r"prompt '1' has 11 tokens; allowed: 10 \(data.max_prompt_length"):
        draw(0, 2, limited)
