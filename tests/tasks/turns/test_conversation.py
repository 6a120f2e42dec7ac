"""Prompts, suffixes and turns, with templates that behave as those of Qwen 2.5, Gemma 4 and a model without tools."""

import logging

import pytest

from storage.journal.turns import CallRecord, TurnRecord, encode_turn
from tasks.turns.agent_language import AgentLanguage
from tasks.turns.conversation import Conversation, TemplateError
from tasks.turns.policy_turn import PolicyTurn, ToolCall
from tasks.turns.tool_schemas import describe_tools
from tests.chat_tokenizers import CHATML, FORGETFUL, GEMMA, QWEN, chat_tokenizer, written

ASKED = [{"role": "user", "content": "What is the weather in Rome?"}]
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = {"role": "tool", "name": "weather", "content": "sunny"}


def weather(city: str, days: int = 1) -> str:
    """The weather in a city.

    Args:
        city: Its name.
        days: How many days ahead.
    """
    return f"{city} {days}"


SCHEMAS = describe_tools([weather])


def conversation(template, schemas=SCHEMAS, **kwargs):
    tokenizer = chat_tokenizer(template, **kwargs)
    return tokenizer, Conversation(tokenizer, schemas)


def of_gemma():
    tokenizer = chat_tokenizer(GEMMA, eos_token="<|endoftext|>")
    return tokenizer, Conversation(tokenizer, SCHEMAS, tokenizer.convert_tokens_to_ids(["<turn|>", "<|tool_response>"]))


def said(name, arguments):
    return {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": name, "arguments": arguments}}],
    }


def test_a_prompt_holds_the_schemas_and_asks_for_a_turn():
    tokenizer, chat = conversation(QWEN)
    text = tokenizer.decode(chat.prompt_ids(ASKED))
    assert '"description": "The weather in a city."' in text
    assert text.endswith("What is the weather in Rome?<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize("answers", [[ANSWER], [ANSWER, {"role": "tool", "name": "weather", "content": "rain"}]])
@pytest.mark.parametrize("template", [QWEN, CHATML])
def test_a_suffix_is_what_the_whole_conversation_has_after_the_stop_token(template, answers):
    tokenizer, chat = conversation(template)
    chat.check()
    suffix = chat.suffix_ids(answers)
    results = "\n".join(f"<tool_response>\n{answer['content']}\n</tool_response>" for answer in answers)
    assert tokenizer.decode(suffix) == f"\n<|im_start|>user\n{results}<|im_end|>\n<|im_start|>assistant\n"


def test_a_suffix_ends_the_rendering_of_the_real_conversation():
    tokenizer, chat = conversation(QWEN)
    turn = written(tokenizer, CALL + "<|im_end|>")
    whole = tokenizer.apply_chat_template(
        [*ASKED, said("weather", {"city": "Rome"}), ANSWER],
        tools=SCHEMAS,
        add_generation_prompt=True,
        return_dict=False,
    )
    assert tuple(whole) == (*chat.prompt_ids(ASKED), *turn, *chat.suffix_ids([ANSWER]))


def test_where_the_answers_token_ends_the_turn_the_suffix_begins_behind_it():
    tokenizer, chat = of_gemma()
    chat.check()
    assert tokenizer.decode(chat.suffix_ids([ANSWER])) == 'response:weather{value:<|"|>sunny<|"|>}<tool_response|>'


def test_a_stop_token_that_is_not_known_is_named():
    tokenizer = chat_tokenizer(GEMMA, eos_token="<|endoftext|>")
    with pytest.raises(TemplateError, match=r"does not preserve prefixes.* ends a turn with a stop token \(0\)"):
        Conversation(tokenizer, SCHEMAS).check()


def test_a_template_whose_beginning_changes_is_refused():
    _, chat = conversation(FORGETFUL)
    with pytest.raises(TemplateError, match=r"^policy\.path: the chat template does not preserve prefixes"):
        chat.check()


def test_a_tokenizer_without_a_template_is_refused():
    _, chat = conversation(None)
    with pytest.raises(TemplateError, match="no chat template; allowed with turns: one that has"):
        chat.check()


@pytest.mark.parametrize("message", ["the user and the assistant take turns", "no"])
def test_a_template_that_refuses_all_is_named_with_its_reason(message):
    _, chat = conversation("{{ raise_exception('" + message + "') }}")
    with pytest.raises(TemplateError, match=f"the chat template refuses a conversation with tools: .*{message}"):
        chat.check()


@pytest.mark.parametrize("first", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_model_without_tools_is_told_of_them_as_text_and_a_line_says_so(first, caplog):
    tokenizer, chat = conversation(CHATML)
    with caplog.at_level(logging.WARNING):
        chat.check()
    assert "knows no tools" in caplog.text
    text = tokenizer.decode(chat.prompt_ids([*first, *ASKED]))
    assert text.count('"name": "weather"') == 1
    assert text.index('"name": "weather"') < text.index("<|im_end|>")
    assert chat.read(written(tokenizer, CALL)).calls == (ToolCall("weather", {"city": "Rome"}, None),)


def test_a_template_with_tools_is_used_as_it_is(caplog):
    _, chat = conversation(QWEN)
    with caplog.at_level(logging.WARNING):
        chat.check()
    assert caplog.text == ""


@pytest.mark.parametrize("stop", ["", "<|im_end|>"])
def test_a_turn_is_read_with_its_stop_token_and_without(stop):
    tokenizer, chat = conversation(QWEN)
    turn = chat.read(written(tokenizer, f"I look.\n{CALL}{stop}"))
    assert turn == PolicyTurn("I look.", (ToolCall("weather", {"city": "Rome"}, None),))


def test_a_turn_of_gemma_is_read():
    tokenizer, chat = of_gemma()
    text = '<|tool_call>call:weather{city:<|"|>Rome, {a: "b"}<|"|>,days:2}<tool_call|><|tool_response>'
    assert chat.read(written(tokenizer, text)).calls == (
        ToolCall("weather", {"city": 'Rome, {a: "b"}', "days": 2}, None),
    )


LETTERS = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "tool_calls": {
            "open": "?",
            "close": "!",
            "repeats": True,
            "content": "text",
            "transform": {"type": "function", "function": {"name": "weather", "arguments": {"city": "{content}"}}},
        },
        "thinking": {"open": "<think>", "close": "</think>", "content": "text"},
        "content": {"content": "text"},
    },
}


def test_the_tokenizers_own_response_template_comes_first():
    tokenizer, chat = conversation(QWEN, response_template=LETTERS)
    turn = chat.read(written(tokenizer, "<think>hm</think>well ?Rome!<|im_end|>"))
    assert turn == PolicyTurn("well", (ToolCall("weather", {"city": "Rome"}, None),), "hm")


def test_what_a_response_template_cannot_read_is_one_call_with_a_problem():
    calls = {"open": "?", "close": "!", "repeats": True, "content": "json"}
    template = LETTERS | {"fields": {"tool_calls": calls, "content": {"content": "text"}}}
    tokenizer, chat = conversation(QWEN, response_template=template)
    chat.check()
    [call] = chat.read(written(tokenizer, "?{no json!")).calls
    assert (call.name, call.arguments) == ("", "?{no json!")
    assert call.problem is not None
    assert call.problem.startswith("the call cannot be read: ValueError")


def test_a_response_template_that_reads_nothing_is_refused():
    _, chat = conversation(QWEN, response_template={"fields": {}})
    with pytest.raises(TemplateError, match=r"^policy\.path: the tokenizer's response_template cannot be used: "):
        chat.check()


def event(number, calls):
    records = tuple(
        CallRecord(call_id="x", name=name, arguments={}, result=result, outcome="answered", unknown=False, seconds=0.1)
        for name, result in calls
    )
    return encode_turn(TurnRecord(turn=number, calls=records, seconds=0.1))


def test_the_messages_of_a_response_are_its_turns_and_the_recorded_results():
    tokenizer, chat = conversation(QWEN)
    first = written(tokenizer, f"I look.{CALL}<|im_end|>")
    suffix = chat.suffix_ids([ANSWER])
    last = written(tokenizer, "It is sunny.<|im_end|>")
    found = chat.messages(
        ASKED,
        [*first, *suffix, *last],
        (len(first), len(suffix), len(last)),
        (event(0, [("weather", "sunny")]), event(1, [])),
    )
    assert found == [
        *ASKED,
        {**said("weather", {"city": "Rome"}), "content": "I look."},
        ANSWER,
        {"role": "assistant", "content": "It is sunny."},
    ]


def test_a_response_that_has_not_begun_has_the_prompts_messages():
    _, chat = conversation(QWEN)
    assert chat.messages(ASKED, [], (0,), ()) == ASKED


@pytest.mark.parametrize(("skips", "content"), [(True, "so it is"), (False, "<|turn>so <|im_start|>it is")])
def test_special_tokens_of_a_turn_are_text_if_they_are_kept_but_not_its_end(skips, content):
    tokenizer, _ = conversation(QWEN)
    chat = Conversation(tokenizer, SCHEMAS, skip_special_tokens=skips)
    said_by_policy = written(tokenizer, "<|turn>so <|im_start|>it is")
    for ids in (said_by_policy, [*said_by_policy, tokenizer.eos_token_id]):
        assert chat.read(ids).content == chat.text(ids) == content
    language = AgentLanguage(tokenizer, skip_special_tokens=skips)
    assert language.spoken([*said_by_policy, tokenizer.eos_token_id], []).message["content"] == content
    assert (
        language.spoken(written(tokenizer, CALL + "<|im_end|>"), SCHEMAS).calls
        == chat.read(written(tokenizer, CALL)).calls
    )
