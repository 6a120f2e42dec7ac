"""Where responses end, by the files of a model: the tokenizer's end, the template's end of turns, and earlier plans."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from storage.clock import ManualClock
from storage.records import layout, records
from storage.records.prompt_table import PromptRow
from storage.records.run import read_plan
from storage.stores.connect import connect
from tasks.learning.pretrained import ModelError, check_model
from tasks.preparing.checks import check_files
from tasks.preparing.evaluation import prepare as prepare_evaluation
from tasks.preparing.iteration import prepare
from tasks.preparing.stop_tokens import StopTokens, checked_stop_tokens, find_stop_tokens
from tests.chat_tokenizers import CHATML, GEMMA, SPECIAL, chat_tokenizer
from tests.small_run import config, memory_store, model_directory
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

URL = "memory://stops"
END, IM_END, TURN_END = SPECIAL.index("<|endoftext|>"), SPECIAL.index("<|im_end|>"), SPECIAL.index("<turn|>")
ENDS_WHEN_FOLLOWED = CHATML.replace("<|im_end|>\n", "{% if not loop.last %}<|im_end|>\n{% endif %}")


def files(folder: Path, eos: Any = END, generation: Any = None, vocab_size: int = 400) -> Path:
    (folder / "config.json").write_text(json.dumps({"vocab_size": vocab_size, "eos_token_id": eos}))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return folder


@pytest.mark.parametrize(
    ("template", "own", "eos", "in_chat", "expected", "doubts"),
    [
        (CHATML, "<|im_end|>", IM_END, True, (IM_END,), []),
        (CHATML, "<|im_end|>", IM_END, False, (IM_END,), []),
        # Most fine-tunes with ChatML.
        (
            CHATML,
            "<|im_end|>",
            END,
            True,
            (END, IM_END),
            ["the tokenizer's eos_token is '<|im_end|>' (2), which is not"],
        ),
        (CHATML, "<|im_end|>", END, False, (END,), ["prompts are text, so responses end at the latter alone"]),
        # A base model with a chat template.
        (CHATML, "<|endoftext|>", END, True, (END, IM_END), ["ends a turn of the assistant with '<|im_end|>' (2)"]),
        (CHATML, "<|endoftext|>", END, False, (END,), []),
        (CHATML, "<|endoftext|>", [END, IM_END], True, (END, IM_END), []),
        (GEMMA, "<|endoftext|>", [END, TURN_END], True, (END, TURN_END), []),
        (GEMMA, "<|endoftext|>", END, True, (END, TURN_END), ["with '<turn|>' (4)"]),
        # What follows only if a message does may be the beginning of that message.
        (ENDS_WHEN_FOLLOWED, "<|endoftext|>", END, True, (END,), ["'<|im_end|>' (2), '<|im_start|>' (1), which is"]),
        (ENDS_WHEN_FOLLOWED, "<|endoftext|>", IM_END, True, (END, IM_END), ["eos_token is '<|endoftext|>' (0)"]),
        # Two tokens: which of them ends the turn is not known.
        (CHATML.replace("<|im_end|>", "<turn|><|im_end|>"), "<|endoftext|>", END, True, (END,), ["responses end at"]),
        # One that decoding keeps is text that rewards would see.
        (CHATML.replace("<|im_end|>", "</tool_call>"), "<|endoftext|>", END, True, (END,), ["responses end at"]),
        (CHATML.replace("<|im_end|>", ""), "<|endoftext|>", END, True, (END,), ["with '<|im_start|>' (1), which"]),
        ("{{ raise_exception('no') }}", "<|endoftext|>", END, True, (END,), []),
        (None, "<|endoftext|>", END, True, (END,), []),
    ],
)
def test_a_chat_ends_where_the_tokenizer_and_its_template_end_it(
    tmp_path: Path, template: str, own: str, eos: Any, in_chat: bool, expected: tuple[int, ...], doubts: list[str]
):
    found = find_stop_tokens(files(tmp_path, eos), chat_tokenizer(template, eos_token=own), in_chat=in_chat)
    assert found.ids == expected
    assert found.texts == tuple(f"{SPECIAL[each]!r} ({each})" for each in expected)
    assert len(found.doubts) == len(doubts)
    for doubt, part in zip(found.doubts, doubts, strict=True):
        assert doubt.startswith("policy.path: ")
        assert part in doubt


def test_a_stop_token_that_is_text_is_doubted(tmp_path: Path):
    tokenizer = chat_tokenizer(CHATML)
    letter = tokenizer.convert_tokens_to_ids("#")
    found = find_stop_tokens(files(tmp_path, IM_END, generation=letter), tokenizer, in_chat=True)
    assert found.ids == (IM_END, letter)
    assert [f"name '#' ({letter}), which is text to the tokenizer" in doubt for doubt in found.doubts] == [True]


def prompt_rows(*prompts: Any) -> list[PromptRow]:
    return [PromptRow(str(place), (5,), prompt, {}) for place, prompt in enumerate(prompts)]


def test_one_prompt_of_messages_makes_it_a_chat(tmp_path: Path):
    asked = [{"role": "user", "content": "a"}]
    for rows, with_turns, expected in (
        (prompt_rows("a", "b"), False, (END,)),
        (prompt_rows("a", asked), False, (END, IM_END)),
        (prompt_rows("a", "b"), True, (END, IM_END)),
    ):
        found: StopTokens = checked_stop_tokens(files(tmp_path), chat_tokenizer(CHATML), rows, with_turns=with_turns)
        assert found.ids == expected


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_ids_that_cannot_be_sampled_are_refused(tmp_path: Path, name: str):
    generation = 400 if name == "generation_config.json" else None
    files(tmp_path, 400 if generation is None else END, generation)
    with pytest.raises(
        ModelError, match=r"policy\.path: .* has eos_token_id 400, which cannot be .* vocab_size \(400\)"
    ):
        check_model(tmp_path)


def test_a_token_of_the_tokenizer_that_cannot_be_sampled_is_refused_in_a_chat_alone(tmp_path: Path):
    tokenizer, folder = chat_tokenizer(CHATML), files(tmp_path, 0, vocab_size=2)
    with pytest.raises(
        ModelError, match=r"stop token '<\|im_end\|>' \(2\) of the tokenizer cannot be sampled; .* \(2\)"
    ):
        checked_stop_tokens(folder, tokenizer, [], with_turns=True)
    assert checked_stop_tokens(folder, tokenizer, prompt_rows("a"), with_turns=False).ids == (0,)


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose files know <|endoftext|> alone, with a tokenizer that ends turns with <|im_end|>."""
    folder = tmp_path_factory.mktemp("chat")
    save_tiny_model(folder, tiny_model(tiny_config(vocab_size=400, eos_token_id=END, max_position_embeddings=256)))
    chat_tokenizer(CHATML).save_pretrained(folder)
    return folder


@pytest.fixture
def settings(chat_model: Path, tmp_path: Path):
    rows = [{"prompt": [{"role": "user", "content": f"Add {k}."}]} for k in range(8)]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    data = {"source": str(tmp_path / "rows.jsonl"), "shuffle": False}
    held_out = {"data": data, "sampling": {"max_completion_length": 40}}
    return config(URL, chat_model, data=data, evaluation=held_out, algorithm={"max_staleness": 1})


@pytest.mark.slow
def test_check_shows_the_stop_tokens_and_the_plan_has_them(settings: Any, caplog: pytest.LogCaptureFixture):
    lines = check_files(settings)
    assert "stop tokens: '<|endoftext|>' (0), '<|im_end|>' (2)" in lines
    (doubt,) = [line for line in lines if line.startswith("not sure: policy.path: ")]
    store = memory_store("stops")
    with caplog.at_level(logging.WARNING):
        prepare(settings, "e1", ManualClock())
    assert doubt in caplog.text
    assert read_plan(store, 0).sampling.stop_token_ids == (END, IM_END)
    evaluated, _ = prepare_evaluation(settings, 0, "e1", ManualClock())
    assert read_plan(connect(evaluated.run_url), 0).sampling.stop_token_ids == (END, IM_END)


@pytest.mark.slow
def test_a_run_keeps_the_stop_tokens_that_it_began_with(settings: Any):
    store = memory_store("stops")
    prepare(settings, "e1", ManualClock())
    # As a version planned it that counted those of config.json alone.
    before = read_plan(store, 0)
    store.delete(layout.plan(0))
    records.commit(store, layout.plan(0), replace(before, sampling=replace(before.sampling, stop_token_ids=(END,))))
    prepare(settings, "e1", ManualClock(), ahead=1)
    assert read_plan(store, 1).sampling.stop_token_ids == (END,)
    evaluated, _ = prepare_evaluation(settings, 0, "e1", ManualClock())
    assert read_plan(connect(evaluated.run_url), 0).sampling.stop_token_ids == (END,)


@pytest.mark.slow
def test_text_ends_as_ever(tmp_path: Path):
    store = memory_store("stops")
    prepare(config(URL, model_directory(tmp_path / "model")), "e1", ManualClock())
    assert read_plan(store, 0).sampling.stop_token_ids == (2,)
