"""Runs whose conversations an agent leads: from the plan, through kills of members, to the reward."""

import json
import os

import pytest

from storage.clock import ManualClock, SystemClock
from storage.journal.assembly import JournalReader
from storage.journal.compaction import read_batches
from storage.journal.shard import Finish
from storage.journal.turns import decode_turn
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan
from storage.stores import connect
from storage.stores.memory import MemoryStore
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tasks.prompts.prompt import PromptError
from tasks.reporting.conclusion import conclude_iteration
from tasks.reporting.export import rollout_tables
from tasks.sampling.engines.scripted_engine import ScriptedEngine
from tasks.sampling.session.session_config import SessionConfig
from tasks.turns.first_request import read_opening
from tasks.turns.opened_environments import opened_environments
from tasks.turns.reading import message_reader
from tasks.turns.tool_schemas import ToolsUnusable
from tests.chat_tokenizers import FORGETFUL, QWEN, chat_tokenizer
from tests.sessions import InTurns, Killed, load
from tests.small_run import PRICES_USD_PER_H, config, everything, memory_store, roll_out, train_small
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

pytestmark = pytest.mark.slow
NAME = "agents"
URL = f"memory://{NAME}"
TOKENIZER = chat_tokenizer(QWEN)
VOCABULARY = 300


def model_with(folder, template):
    tokenizer = chat_tokenizer(template)
    fields = {"vocab_size": 400, "eos_token_id": tokenizer.eos_token_id, "max_position_embeddings": 2000}
    save_tiny_model(folder, tiny_model(tiny_config(**fields, hidden_size=32)))
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    return model_with(tmp_path_factory.mktemp("of_agents"), QWEN)


@pytest.fixture
def rows(tmp_path, monkeypatch):
    monkeypatch.setenv("AGENT_NOTES", str(tmp_path / "notes"))
    path = tmp_path / "rows.jsonl"
    asked = [{"prompt": [{"role": "user", "content": f"Roam {k}."}], "size": k, "start": k} for k in range(6)]
    path.write_text("".join(json.dumps(row) + "\n" for row in asked))
    return path


def settings(model_dir, rows, agent="roams", **sections):
    whole = {
        "data": {"source": str(rows), "shuffle": False},
        "rewards": [{"function": "environment"}],
        "turns": {"agent": f"tests.agent_functions:{agent}", "processes": 1, "call_time_limit_s": 120.0},
        "sampling": {"max_completion_length": 120},
    }
    return config(URL, model_dir, **whole | sections)


def test_a_plan_asks_the_agent_how_it_begins(model_dir, rows):
    store = memory_store(NAME)
    prepare(settings(model_dir, rows), "e1", ManualClock())
    stored = read_prompts(store, read_plan(store, 0))
    for size, row in enumerate(stored):
        first = read_opening(row.opening)
        assert list(first.messages) == row.prompt == [{"role": "user", "content": f"Roam {size}."}]
        text = TOKENIZER.decode(row.token_ids)
        assert ('"name": "add"' in text) == (len(first.tools) == 1) == (size % 2 == 1)
        assert text.endswith(f"<|im_start|>user\nRoam {size}.<|im_end|>\n<|im_start|>assistant\n")
        assert row.columns == {"size": size, "start": size}


def test_check_tells_of_the_agent(model_dir, rows):
    memory_store(NAME)
    told = "turns: the first request of tests.agent_functions:roams, and the chat template with its tools"
    assert told in check_files(settings(model_dir, rows))


@pytest.mark.parametrize(
    ("agent", "template", "kind", "message"),
    [
        ("silent", QWEN, ToolsUnusable, "^turns.agent: 'tests.agent_functions:silent' sends no request: it ended"),
        ("adds", FORGETFUL, PromptError, r"^policy\.path: the chat template does not preserve prefixes"),
    ],
)
def test_what_cannot_be_begun_is_refused_before_anything_is_written(rows, tmp_path, agent, template, kind, message):
    store = memory_store(NAME)
    with pytest.raises(kind, match=message):
        prepare(settings(model_with(tmp_path / "model", template), rows, agent), "e1", ManualClock())
    assert everything(store) == {}


class Counting(ScriptedEngine):
    """Its process is killed in the middle of a step; `drawn` are the tokens that it has returned."""

    def __init__(self, steps: int, clock) -> None:
        super().__init__(VOCABULARY, 4, median_length=9, clock=clock, step_time_s=lambda _: 1.0)
        self.left = steps
        self.drawn = 0

    def step(self):
        if self.left == 0:
            raise Killed
        self.left -= 1
        deltas = super().step()
        self.drawn += sum(len(delta.token_ids) for delta in deltas)
        return deltas


def lived(store, slot, chosen, model_dir, steps=10**9):
    """The engine of a member, whose process was killed after so many steps."""
    clock, plan = ManualClock(), read_plan(store, 0)
    engine = Counting(steps, clock)
    limits = {"flush_interval_s": 4.0, "heartbeat_interval_s": 4.0, "claim_ttl_s": 16.0, "idle_timeout_s": 0.0}
    member = SessionConfig(
        slot=slot, pool="rollout", host="here", pid=os.getpid(), engine_restarts_max=0, started_at_s=0.0, **limits
    )
    with opened_environments(chosen.turns, store, plan, model_dir) as environments:
        session = InTurns(
            store,
            plan,
            prompts=read_prompts(store, plan),
            engine=engine,
            load=load,
            config=member,
            clock=clock,
            notice=lambda: False,
            environments=environments,
            health=None,
        )
        try:
            session.run()
        except Killed:
            assert steps < 10**9
    return engine


def assembled(store):
    plan = read_plan(store, 0)
    reader = JournalReader(store, plan)
    reader.refresh()
    return [reader.assemble(response) for response in range(plan.num_responses)]


def learned_from(store):
    return [
        (each.token_ids.tolist(), each.logprobs.tolist(), each.origins, each.finish) for each in assembled(store)
    ], [[(record.messages, record.reward) for record in map(decode_turn, each.events)] for each in assembled(store)]


def test_killed_members_end_with_the_undisturbed_conversations_and_decode_no_token_twice(model_dir, rows):
    chosen = settings(model_dir, rows)
    whole = memory_store(NAME)
    prepare(chosen, "e1", ManualClock())
    planned = everything(whole)
    slots = [slot.slot for slot in read_plan(whole, 0).slots]
    for slot in slots:
        lived(whole, slot, chosen, model_dir)
    turns = [len(each.events) for each in assembled(whole)]
    assert max(turns) > 2
    assert {each.finish for each in assembled(whole)} <= {Finish.STOP, Finish.LENGTH}
    expected = learned_from(whole)

    cut = memory_store(NAME, MemoryStore(NAME))
    for key, body in planned.items():
        cut.create(key, body)
    rebuilt = set()
    for slot, steps in ((slots[0], 9), (slots[0], 12), (slots[0], 7), (slots[1], 21)):
        lived(cut, slot, chosen, model_dir, steps)
    durable = sum(each.policy_length for each in assembled(cut))
    assert durable > 0
    drawn = sum(lived(cut, slot, chosen, model_dir).drawn for slot in slots)
    assert learned_from(cut) == expected
    assert drawn == sum(each.policy_length for each in assembled(cut)) - durable
    for each in assembled(cut):
        records = list(map(decode_turn, each.events))
        rebuilt |= {record.rebuilt for record in records}
        assert not any(record.diverged or record.failure for record in records)
    assert "replayed" in rebuilt


def test_what_an_agent_returns_is_the_reward_and_its_conversation_can_be_read(model_dir, rows):
    chosen = settings(model_dir, rows)
    store = memory_store(NAME)
    prepare(chosen, "e1", ManualClock())
    for slot in read_plan(store, 0).slots:
        lived(store, slot.slot, chosen, model_dir)
    responses = assembled(store)
    train_small(URL, 0)
    graded = {
        each.response: each.rewards["environment"] for batch in read_batches(store, 0) for each in batch.responses
    }
    assert len(graded) == len(responses)
    plan, prompts = read_plan(store, 0), read_prompts(store, read_plan(store, 0))
    conclude_iteration(store, 0, PRICES_USD_PER_H, SystemClock())
    exported = [row for table in rollout_tables(store, plan, TOKENIZER.decode) for row in table.to_pylist()]
    shown = {row["response"]: json.loads(row["messages"]) for row in exported}
    read = message_reader(chosen.turns, plan, model_dir)
    for each in responses:
        row = prompts[each.response // plan.num_generations]
        asked, followed = read(row, each.token_ids.tolist(), each.origins, each.events)
        assert list(asked) == row.prompt
        said = [len(message["content"]) for message in followed if message["role"] == "assistant"]
        told = [message["content"].split()[0] for message in followed if message["role"] == "user"]
        assert told == [str(length) for length in said[: len(told)]]
        assert [m["content"] for m in shown[each.response] if m["role"] == "user"] == [
            message["content"] for message in followed if message["role"] == "user"
        ]
        reward = decode_turn(each.events[-1]).reward
        assert reward == graded[each.response]
        # One that a limit has ended raises, unless it would have ended then.
        assert reward == float(sum(said)) or (reward == 0 and each.finish is Finish.LENGTH)


def test_members_from_a_url_alone_answer_agents(model_dir, rows):
    store = memory_store(NAME)
    assert connect.connect(URL) is store
    prepare(settings(model_dir, rows), "e1", ManualClock())
    roll_out(URL, 0)
    assert all(each.finish.ends_response for each in assembled(store))
