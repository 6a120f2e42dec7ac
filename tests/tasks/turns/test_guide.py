"""The environment and the tool in the guide's page about turns can be described, reset, used, and rebuilt."""

import importlib
import json
import re
from pathlib import Path

import pytest
import yaml

from storage.journal.shard import Finish
from tasks.configuration.turns import TurnsConfig
from tasks.prompts.loading import DataConfig, load_prompts
from tasks.turns.testing import answered, record_of
from tasks.turns.tool_schemas import call_problem, check_names, describe_tools
from tests.agent_conversations import called, talk

PAGE = (Path(__file__).parents[3] / "docs/guide/turns.md").read_text(encoding="utf-8")


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


def test_the_example_keeps_the_contract(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hotel_of_the_guide.py").write_text(blocks("python")[0], encoding="utf-8")
    module = importlib.import_module("hotel_of_the_guide")
    schemas = describe_tools([module.convert], module.Hotel)
    section, _ = [yaml.safe_load(text)["turns"] for text in blocks("yaml")]
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in section.items()}
    check_names(TurnsConfig(**given), schemas)
    [row] = blocks("json")
    (tmp_path / "hotels.jsonl").write_text(row, encoding="utf-8")
    [prompt] = load_prompts(DataConfig(source=str(tmp_path / "hotels.jsonl")))
    hotel = module.Hotel()
    assert hotel.reset(**prompt.columns) == " There are the rooms 1 to 3."
    assert call_problem(schemas, "price", {"room": 2}) is None
    assert hotel.price(2) == "60 dollars"
    assert call_problem(schemas, "convert", {"dollars": 60, "currency": "JPY"}) is not None
    assert module.convert(60, "EUR") == "54.00 EUR"
    hotel.book(2)
    rebuilt = module.Hotel()
    rebuilt.reset(**prompt.columns)
    rebuilt.set_state(json.loads(json.dumps(hotel.get_state())))
    assert (hotel.get_reward(), rebuilt.get_reward()) == (1.0, 1.0)
    rebuilt.book(1)
    assert rebuilt.get_reward() == 1.0


def test_the_agent_of_the_example_asks_what_is_served(tmp_path, monkeypatch):
    pytest.importorskip("openai")
    *_, text = blocks("python")
    assert text.startswith("from openai import")
    tool = "def run(call):\n    return call.function.arguments\n"
    whole = f"from tests.agent_functions import ADD\n{text}\nTOOLS = [ADD]\n{tool}"
    (tmp_path / "solver_of_the_guide.py").write_text(whole, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    with talk("solver_of_the_guide:solve", {"question": "3?", "answer": "3"}) as conversation:
        environments, turn = conversation.environments(), conversation.said(called((3, 0)))
        last = answered(environments, conversation.then(turn, answered(environments, turn), "3."))
        assert (last.finish, record_of(last).reward) == (Finish.STOP, 1.0)
    assert TurnsConfig(**yaml.safe_load(blocks("yaml")[1])["turns"]).agent == "solver:solve"
