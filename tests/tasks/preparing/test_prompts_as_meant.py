"""`check` and the first plan of a run refuse, or doubt, prompts that are not what their rows say."""

import json

import pytest

from storage.clock import ManualClock
from storage.records.prompt_table import read_prompts
from storage.records.run import holds_run, read_plan
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tasks.preparing.tools import prompt_tokenizer
from tasks.prompts.prompt import PromptError
from tests.chat_tokenizers import QWEN, chat_tokenizer
from tests.small_run import config, memory_store
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

URL = "memory://meant"
MODULE = "tests.tasks.turns.environments_for_plan"
USER = {"role": "user", "content": "2 + 2?"}
SYSTEM = {"role": "system", "content": "Answer in French."}
ANSWER = {"role": "assistant", "content": "4"}
TOOL = {"type": "function", "function": {"name": "peek", "description": "d", "parameters": {"type": "object"}}}
FORGETS_SYSTEM = QWEN.replace("m.role == 'system')", "m.role == 'system') and m.role != 'system'")
DOUBT = "1 of 2 rows, the first is {}: line 2: message 0 (role system) is not in the prompt as it is written"


@pytest.fixture(scope="module")
def model_with(tmp_path_factory):
    """A function that makes a model directory with this chat template."""

    def made(template, vocab_size=400):
        folder = tmp_path_factory.mktemp("model")
        fields = {"vocab_size": vocab_size, "eos_token_id": 2, "max_position_embeddings": 2000, "hidden_size": 32}
        save_tiny_model(folder, tiny_model(tiny_config(**fields)))
        chat_tokenizer(template).save_pretrained(folder)
        return folder

    return made


@pytest.fixture
def rows(tmp_path):
    """A function that writes a file of rows."""

    def written(*prompts, name="rows.jsonl", **columns):
        path = tmp_path / name
        path.write_text("".join(json.dumps({"prompt": prompt, **columns}) + "\n" for prompt in prompts))
        return str(path)

    return written


def settings(model, source, *, data=None, **sections):
    reward = {"function": "length", "arguments": {"free_tokens": 1, "scale_tokens": 1}}
    return config(URL, model, data={"source": source, **(data or {})}, rewards=[reward], **sections)


def both(chosen):
    """What `check` and the first plan refuse, which is the same; nothing is created."""
    store = memory_store("meant")
    with pytest.raises(PromptError) as by_check:
        check_files(chosen)
    with pytest.raises(PromptError) as by_plan:
        prepare(chosen, "e1", ManualClock())
    assert str(by_check.value) == str(by_plan.value)
    assert not holds_run(store)
    assert "\n" not in str(by_check.value)
    return str(by_check.value)


def doubts(chosen, caplog):
    """What `check` and the first plan doubt, which is the same; the plan is made, and the next says nothing."""
    store = memory_store("meant")
    checked = [line for line in check_files(chosen) if line.startswith("not sure: ")]
    caplog.clear()
    prepare(chosen, "e1", ManualClock())
    assert [line for line in caplog.messages if line.startswith("not sure: ")] == checked
    caplog.clear()
    prepare(chosen, "e1", ManualClock())
    assert not any(line.startswith("not sure: ") for line in caplog.messages)
    assert holds_run(store)
    return checked


@pytest.mark.slow
def test_the_answer_in_the_prompt_is_refused_unless_it_is_continued_or_allowed(model_with, rows):
    model, source = model_with(QWEN), rows([USER, ANSWER])
    assert "data.source: 1 of 1 rows" in both(settings(model, source))
    store = memory_store("meant")
    prepare(settings(model, source, data={"continue_final_message": True}), "e1", ManualClock())
    [row, *_] = read_prompts(store, read_plan(store, 0))
    assert chat_tokenizer(QWEN).decode(row.token_ids).endswith("<|im_start|>assistant\n4")
    memory_store("meant")
    assert check_files(settings(model, source, data={"allow": ["assistant_last"]}))


@pytest.mark.slow
def test_a_dropped_system_prompt_is_doubted_with_its_line_unless_it_is_allowed(model_with, rows, caplog):
    model, source = model_with(FORGETS_SYSTEM), rows([USER], [SYSTEM, USER])
    [line] = doubts(settings(model, source), caplog)
    assert line.startswith(f"not sure: data.source: {DOUBT.format(source)}")
    assert doubts(settings(model, source, data={"allow": ["dropped_message"]}), caplog) == []


@pytest.mark.slow
def test_the_prompts_of_the_evaluation_are_looked_at_too(model_with, rows, caplog):
    model, source = model_with(FORGETS_SYSTEM), rows([USER], [SYSTEM, USER], name="held_out.jsonl")
    held_out = {"data": {"source": source}, "sampling": {"max_completion_length": 8}, "interval": 1}
    fine = rows([USER])
    [line] = doubts(settings(model, fine, evaluation=held_out), caplog)
    assert line.startswith(f"not sure: evaluation.data.source: {DOUBT.format(source)}")
    assert line.endswith("or evaluation.data.allow: [dropped_message]")
    held_out["data"]["source"] = rows([USER, ANSWER], name="answers.jsonl")
    assert both(settings(model, fine, evaluation=held_out)).startswith("evaluation.data.source: 1 of 1 rows, the first")


@pytest.mark.slow
def test_a_held_out_prompt_of_tokens_without_an_embedding_is_refused(model_with, rows):
    beyond = chat_tokenizer(QWEN).convert_tokens_to_ids("<tool_call>")
    source = rows([{"role": "user", "content": "What is <tool_call>?"}], name="held_out.jsonl")
    held_out = {"data": {"source": source}, "sampling": {"max_completion_length": 8}, "interval": 1}
    refused = both(settings(model_with(QWEN, beyond), rows([USER]), evaluation=held_out))
    assert refused.startswith(f"evaluation: prompt '0' has the token {beyond}, for which the model has no embedding")


@pytest.mark.slow
def test_messages_without_a_chat_template_are_refused(model_with, rows):
    refused = both(settings(model_with(None), rows([USER])))
    assert refused.startswith(
        "policy.path: the tokenizer has no chat template, and prompt '0' is chat messages; allowed"
    )


@pytest.mark.slow
def test_a_template_without_bounds_is_refused_before_anything_is_rendered(model_with, rows):
    endless = "{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxxxxx{% endfor %}{% endfor %}"
    assert "policy.path: the chat template makes more than 4,194,304 characters" in both(
        settings(model_with(endless), rows([USER]))
    )


@pytest.mark.slow
def test_with_turns_tools_of_rows_are_doubted_and_other_settings_of_prompts_refused(model_with, rows, caplog):
    model, source = model_with(QWEN), rows([USER], [USER], tools=[TOOL])
    turns = {"tools": [f"{MODULE}:look"]}
    [line] = doubts(settings(model, source, turns=turns), caplog)
    assert "2 of 2 rows" in line
    assert "the tool 'peek' of the column tools is not in the prompt" in line
    for name, value in (("continue_final_message", True), ("chat_template_kwargs", {"a": 1})):
        with pytest.raises(PromptError, match=rf"^data\.{name}: value .*; allowed with turns: "):
            prompt_tokenizer(settings(model, source, data={name: value}, turns=turns), model)


@pytest.mark.slow
def test_with_turns_prompts_are_compared_as_without(model_with, rows):
    refused = both(settings(model_with(QWEN), rows([USER, ANSWER]), turns={"tools": [f"{MODULE}:look"]}))
    assert "the last message is the assistant's" in refused
