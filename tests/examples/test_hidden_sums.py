"""The task of `make demo-tools`: its environment, its tokenizer, and the ledger that judges a run."""

import random
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice

import pytest
import yaml

from examples.call_ledger import CallLedger, audited
from examples.hidden_sums import BASE, KEYS, LEDGER, STEP_COUNTS, HiddenSums, dataset_rows, right_sum
from examples.tools_demo import CONFIG
from examples.tools_warm_start import LOOK, chat_tokenizer, demonstration
from storage.journal.turns import CallRecord, TurnRecord
from tasks.turns.conversation import Conversation
from tasks.turns.current_call import CALL, CurrentCall
from tasks.turns.policy_turn import PolicyTurn, ToolCall
from tasks.turns.tool_schemas import describe_tools

TABLE = {key: str(index % BASE) for index, key in enumerate(KEYS)}


def environment(keys="bd"):
    made = HiddenSums()
    made.reset(keys=keys, table=TABLE, prompt_id="7")
    return made


@contextmanager
def called(call_id="call-0", response=3):
    token = CALL.set(CurrentCall(call_id=call_id, epoch=0, iteration=2, response=response))
    yield
    CALL.reset(token)


def turn(*calls, **fields):
    return TurnRecord(turn=0, calls=calls, seconds=0.1, **fields)


def call(call_id, *, unknown=False, outcome="answered"):
    return CallRecord(
        call_id=call_id, name="look", arguments={"key": "a"}, result="1", outcome=outcome, unknown=unknown, seconds=0.1
    )


def test_only_the_keys_that_were_asked_for_in_their_order_are_rewarded():
    asked = environment()
    assert [asked.look("b"), asked.look("d")] == ["1", "3"]
    assert asked.get_reward() == 1
    assert asked.look("z") == "x"
    assert asked.get_reward() == 0
    other = environment()
    other.look("d")
    other.look("b")
    assert other.get_reward() == 0


def test_restored_environment_goes_on_without_a_look_up(tmp_path, monkeypatch):
    monkeypatch.setenv(LEDGER, str(tmp_path / "ledger"))
    restored = environment()
    restored.restore([{"calls": [{"name": "look", "arguments": {"key": "b"}, "result": "1"}]}])
    assert CallLedger(tmp_path / "ledger").rows(2) == []
    with called():
        restored.look("d")
    assert restored.get_reward() == 1
    assert [row.begun for row in CallLedger(tmp_path / "ledger").rows(2)] == [1]


def test_last_message_must_name_the_sum():
    said = ["14;#4", "14;#3", "#", "4", "x#4", "#44"]
    completions = [[{"role": "assistant", "content": "?b!"}, {"role": "assistant", "content": text}] for text in said]
    assert right_sum(completions, ["bd"] * 6, [TABLE] * 6, extra=None) == [1, 0, 0, 0, 1, 0]


def test_all_steps_are_equally_hard():
    size = len(STEP_COUNTS)
    rows = list(islice(dataset_rows(random.Random(0)), 5 * size))
    assert size == yaml.safe_load(CONFIG.read_text())["run"]["num_prompts_per_step"]
    for step in range(5):
        counts = sorted(len(row["keys"]) for row in rows[step * size : (step + 1) * size])
        assert counts == sorted(STEP_COUNTS)
    for row in rows:
        assert set(row["table"]) == set(KEYS)
        assert all(0 <= int(digit) < BASE for digit in row["table"].values())
        assert row["prompt"][0]["content"] == row["keys"]


def test_conversation_in_the_chat_template_is_the_demonstrated_one():
    tokenizer, keys = chat_tokenizer(), "bd"
    pieces = demonstration(random.Random(0), keys, TABLE, noise=0.0)
    assert "".join(text for text, _ in pieces) == "?b!<eos>1=01;?d!<eos>3=14;#4<eos>"
    messages = [{"role": "user", "content": keys}]
    text = "<bos>bd="
    for said, own in pieces:
        rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        if own:
            assert rendered == text
            message = tokenizer.parse_response(said.removesuffix("<eos>"), prefix=rendered)
            messages.append({"content": "", **message})
        else:
            messages.append({"role": "tool", "name": "look", "content": said.removesuffix("=")})
        text += said
    assert tokenizer.apply_chat_template(messages, tokenize=False) == text
    asked = {"name": "look", "arguments": {"key": "d"}}
    assert messages[3] == {"role": "assistant", "content": "01;", "tool_calls": [{**LOOK, "function": asked}]}
    assert messages[-1]["content"] == "14;#4"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text.replace("<bos>", "^").replace("<eos>", "$"))
    assert tokenizer.decode(ids) == text
    assert tokenizer.unk_token_id not in ids


def test_conversation_of_a_run_reads_and_writes_as_demonstrated():
    tokenizer = chat_tokenizer()
    chat = Conversation(tokenizer, describe_tools({}, HiddenSums))
    chat.check()

    def tokens(text):
        return tuple(tokenizer(text, add_special_tokens=False)["input_ids"])

    assert chat.prompt_ids([{"role": "user", "content": "bd"}]) == tokens("<bos>bd=")
    assert chat.suffix_ids([{"role": "tool", "name": "look", "content": "3"}]) == tokens("3=")
    assert chat.read(tokens("01;?d!<eos>")) == PolicyTurn("01;", (ToolCall("look", {"key": "d"}, None),))
    assert chat.read(tokens("14;#4<eos>")) == PolicyTurn("14;#4", ())
    cut = chat.read(tokens("14;?"))
    assert not [call for call in cut.calls if call.problem is None and call.arguments != {"key": ""}]


def test_tokenizer_keeps_its_templates_in_a_directory(tmp_path):
    tokenizer = chat_tokenizer()
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    assert (loaded.chat_template, loaded.response_template) == (tokenizer.chat_template, tokenizer.response_template)


def test_noise_changes_sums_and_no_look_up():
    rng = random.Random(1)
    noisy = [demonstration(rng, "abcd", TABLE, noise=1.0) for _ in range(20)]
    assert len({"".join(text for text, own in pieces if own) for pieces in noisy}) > 10
    assert {tuple(text for text, own in pieces if not own) for pieces in noisy} == {("0=", "1=", "2=", "3=")}


def test_ledger_counts_what_is_begun_and_ended_and_sleeps_once(tmp_path):
    ledger = CallLedger(tmp_path / "ledger")
    ledger.order_sleep(iteration=2, response=3, seconds=0.25)
    first = CurrentCall(call_id="call-0", epoch=0, iteration=2, response=3)
    assert ledger.begin(first, process=10) == 0.25
    assert CallLedger(tmp_path / "ledger").begin(replace(first, epoch=1), process=11) == 0
    ledger.end(first)
    ledger.begin(replace(first, call_id="call-1", iteration=1), process=10)
    [row] = ledger.rows(2)
    assert (row.call_id, row.response, row.process, row.begun, row.ended) == ("call-0", 3, 11, 2, 1)


def ledger_of(folder, *call_ids):
    ledger = CallLedger(folder / "ledger")
    for call_id in call_ids:
        made = CurrentCall(call_id=call_id, epoch=0, iteration=2, response=3)
        ledger.begin(made, process=1)
        ledger.end(made)
    return ledger.rows(2)


def test_call_made_again_as_an_unknown_one_is_in_order(tmp_path):
    records = [turn(call("a"), call("b", unknown=True)), turn(call("c", outcome="invalid")), turn()]
    audit = audited(ledger_of(tmp_path, "a", "b", "b"), records)
    assert audit.holds({"b"})
    assert (audit.turns, audit.calls, audit.again, audit.unknown) == (3, 2, {"b"}, {"b"})
    assert not audit.holds({"a"})


@pytest.mark.parametrize(
    ("made", "records"),
    [
        (["a", "b", "a"], [turn(call("a"), call("b"))]),
        (["a", "b", "c"], [turn(call("a"), call("b"))]),
        (["a"], [turn(call("a"), call("b"))]),
        (["a", "b"], [turn(call("a"), call("b"), diverged=True)]),
    ],
    ids=["answered and repeated", "made and not recorded", "recorded and not made", "diverged"],
)
def test_ledger_that_tells_of_a_fault_does_not_pass(tmp_path, made, records):
    assert not audited(ledger_of(tmp_path, *made), records).holds(set())
