"""An environment that OpenEnv serves is played over its own client, goes on after its member is gone, and is trained.

OpenEnv's dependencies cannot be installed beside constraints.txt. These tests run in an environment of their own:

    python3.11 -m venv .venv-openenv
    .venv-openenv/bin/pip install -c constraints.txt -e '.[dev]' fastapi uvicorn websockets fastmcp
    .venv-openenv/bin/pip install --no-deps openenv==0.10.0
    .venv-openenv/bin/python -m pytest -m peers tests/tasks/turns/test_openenv.py
"""

import json
import socket
import threading
import time
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

from examples.tools_warm_start import chat_tokenizer
from storage.journal.compaction import read_responses
from storage.journal.shard import Finish
from storage.records import layout
from storage.weights import tensor_sets
from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments, reset_texts
from tasks.turns.testing import LIMIT_S, record_of
from tests.character_turns import STOP, CharacterConversation, text_of, walk
from tests.chat_tokenizers import written
from tests.memorised_policy import memorised
from tests.small_run import commit_iteration, config, memory_store, plan_iteration, roll_out, train_small

pytestmark = [pytest.mark.peers, pytest.mark.slow]
OPENENV, SEED = "0.10.0", 27
GAME = TurnsConfig(
    environment="tests.openenv_game:GuessingEnv",
    call_time_limit_s=LIMIT_S,
    processes=1,
    replay=True,
)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    try:
        found = version("openenv")
    except PackageNotFoundError:
        found = "none"
    if found != OPENENV:
        pytest.skip(f"needs openenv {OPENENV} (found: {found}); this file says how to install it")
    uvicorn, game = import_module("uvicorn"), import_module("tests.openenv_game")
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = uvicorn.Server(uvicorn.Config(game.served(), log_level="error", ws="websockets-sansio"))
        thread = threading.Thread(target=server.run, args=([listener],), daemon=True)
        thread.start()
        deadline_s = time.monotonic() + LIMIT_S
        while not server.started:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        monkeypatch.setenv(game.URL, f"http://127.0.0.1:{listener.getsockname()[1]}")
        yield server
        server.should_exit = True
        thread.join(LIMIT_S)


def test_a_served_game_is_played_and_goes_on_in_another_session_of_its_server(server: Any):
    opening, again = reset_texts(GAME, [{}, {}], [SEED, SEED])
    assert opening == again == "Guess a digit."
    opened: list[ProcessEnvironments] = []

    def open_environments() -> ProcessEnvironments:
        reset = Reset({}, SEED, opening)
        opened.append(ProcessEnvironments(GAME, lambda _: CharacterConversation(), [STOP], lambda _: reset, bytes))
        return opened[-1]

    try:
        texts = [
            '!guess {"number": 3}',
            '!guess {"number": 9}',
            '!guess {"number": "seven"}',
            '!guess {"number": 7}',
            "so",
        ]
        answers = walk(open_environments, texts, [1, 3])
    finally:
        for environments in opened:
            environments.close()
    assert [text_of(answer) for answer in answers[:2]] == ["<too low after 1>\n", "<too high after 2>\n"]
    assert text_of(answers[2]).startswith("<error: ")
    assert text_of(answers[3]) == "<right after 3>\n"
    assert [record_of(answer).rebuilt for answer in answers] == ["new", "replayed", "kept", "replayed", "kept"]
    assert (answers[4].finish, record_of(answers[4]).reward) == (Finish.STOP, 1.0)


def test_a_step_of_the_optimizer_is_made_on_what_was_played(server: Any, tmp_path: Path):
    """A policy that guesses in half of its responses, and is rewarded by the server's answer to its first guess."""
    rows = [{"prompt": [{"role": "user", "content": "f"}], "id": str(number)} for number in range(2)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    looks, guesses = "?f!<eos>3=#3<eos>", "#3<eos>"
    url = "memory://openenv"
    store = memory_store("openenv")
    settings = config(
        url,
        memorised(tmp_path / "model", looks, guesses),
        run={"num_prompts_per_step": 2, "num_generations": 8},
        data={"source": str(tmp_path / "rows.jsonl")},
        turns={"environment": "tests.openenv_game:LookingEnv"},
        rewards=[{"function": "environment"}],
        sampling={"max_completion_length": 24},
        rollout={"engine": "torch", "dtype": "float32", "context_length": 64},
    )
    plan_iteration(settings)
    roll_out(url, 0)
    trained = train_small(url, 0)
    metrics = commit_iteration(url, 0).metrics
    said = [list(row.token_ids) for row in read_responses(store, 0)]
    ids = {text: written(chat_tokenizer(), text) for text in (looks, guesses)}
    looked = said.count(ids[looks])
    assert looked + said.count(ids[guesses]) == 16
    assert 0 < looked < 16
    assert (metrics["turns/calls"], metrics["reward"]) == (looked, looked / 16)
    # What the policy read is not trained: "3=".
    assert metrics["num_tokens"] == sum(map(len, said)) - 2 * looked
    assert trained.weight_version == 1
    assert metrics["actor/grad_norm"] > 0
    before, after = (tensor_sets.read_manifest(store, layout.weights(version)).tensors for version in (0, 1))
    assert before != after
