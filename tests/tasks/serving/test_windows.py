"""A key has one answer: whatever the server's deaths, and whichever life of the server is asked."""

import threading
import time
from contextlib import suppress

import pytest

from storage.records import layout, prompt_table
from storage.records.run import exists, holds_run, read_plan
from storage.stores.connect import connect
from tasks.external.plans import WrongStep
from tasks.external.rollouts import Rollouts
from tasks.learning.journal_follower import GroupTimeout
from tasks.sampling.engines.choose import build_engine
from tasks.serving.windows import REQUEST
from tasks.turns.chat_request import Refusal
from tests.dying_store import Killed, ProgramDies
from tests.processes import wait_until
from tests.served_run import SECTIONS, crew, life, machines, seen, settings
from tests.small_run import memory_store

ASKED = {"one": {"prompt": "1+1="}, "two": {"prompt": [1, 2, 3], "n": 3}, "three": {"prompt": "3+3=", "max_tokens": 2}}


def requests_of(url):
    """The requests of each planned iteration."""
    store, found = connect(url), []
    while exists(store, layout.plan(len(found))):
        rows = prompt_table.read_prompts(store, read_plan(store, len(found)))
        found.append([row.columns[REQUEST] for row in rows])
    return found


def answers(given):
    """The answers of one life, request after request; less than all if it dies."""
    found = {}
    with life(given) as server:
        for key, body in ASKED.items():
            answer = server.ask(key, **body)
            if answer is None:
                break
            found[key] = seen(answer)
    return found


def test_answers_are_recorded_responses_and_the_weights_stay(tmp_path, model):
    url = str(tmp_path / "run")
    with crew(url):
        found = answers(settings(url, model))
    assert {key: len(answer) for key, answer in found.items()} == {"one": 1, "two": 3, "three": 1}
    assert requests_of(url) == [["one"], ["two"] * 3, ["three"]]
    manifests = [key for key in connect(url).list(layout.WEIGHTS) if not key.endswith("manifest.json")]
    assert all(key.startswith(layout.weights(0)) for key in manifests)
    # The next life has nothing in memory.
    with life(settings(url, model)) as server:
        assert {key: seen(server.ask(key, **body)) for key, body in ASKED.items()} == found
    assert len(requests_of(url)) == 3


@pytest.mark.slow
def test_a_server_killed_at_any_write_answers_each_key_once_and_alike(model):
    def given(name):
        # The scripted engine's tokens are others in each weight version; those of a model follow from its weights.
        return settings(f"memory://{name}", model, rollout={"engine": "torch", "device": "cpu"})

    name = "served-undisturbed"
    undisturbed = ProgramDies(name, {})
    memory_store(name, undisturbed)
    with crew(f"memory://{name}"):
        expected = answers(given(name))
    assert len(expected) == len(ASKED)
    assert len(undisturbed.written) > 40
    tokens = {key: [each[1:] for each in answer] for key, answer in expected.items()}
    for at, key in list(enumerate(undisturbed.written))[::4]:
        name = f"served-{at}"
        store = ProgramDies(name, {}, writes=at)
        memory_store(name, store)
        first = {}
        with crew(f"memory://{name}"):
            with suppress(Killed):
                first = answers(given(name))
            store.left = 1 << 30
            second = answers(given(name))
        assert second | first == second, f"killed at write {at}, {key}"
        assert {key: [each[1:] for each in answer] for key, answer in second.items()} == tokens
        assert requests_of(f"memory://{name}") == [["one"], ["two"] * 3, ["three"]], f"killed at write {at}, {key}"


def test_answers_of_an_ended_window_are_in_the_run_and_not_in_memory(tmp_path, model):
    url = str(tmp_path / "run")
    with life(settings(url, model)) as server, crew(url):
        first = seen(server.ask("one", prompt="1+1="))
        assert server.ask("two", prompt="2+2=")
        assert server.windows.answer("one") is None
        # Whoever has looked into the run before that has to look again.
        assert server.windows.ask("one", server.model.prompt("1+1="), 1, step=0) is None
        assert seen(server.ask("one", prompt="1+1=")) == first
    assert requests_of(url) == [["one"], ["two"]]


def test_requests_of_one_moment_share_an_iteration_up_to_its_size(tmp_path, model):
    url = str(tmp_path / "run")
    with life(settings(url, model)) as server:
        found = [server.windows.ask(f"{k}", server.model.prompt(f"{k}+{k}="), 1) for k in range(6)]
        again = server.windows.ask("0", server.model.prompt("0+0="), 1)
        with crew(url):
            assert len({answer.result(60).groups[0].prompt for answer in found}) == 6
        assert again is found[0]
    assert [len(each) for each in requests_of(url)] == [4, 2]


class Stalled:
    """An engine that decodes the response to one prompt only when the gate is open."""

    def __init__(self, engine, prompt, gate):
        self._engine, self._prompt, self._gate, self._stalls = engine, prompt, gate, False

    def start(self, requests):
        self._stalls |= any(tuple(request.prompt_ids) == self._prompt for request in requests)
        self._engine.start(requests)

    def step(self):
        if self._stalls and not self._gate.wait(0.01):
            return []
        return self._engine.step()

    def __getattr__(self, name):
        return getattr(self._engine, name)


def test_a_request_that_comes_beside_a_long_one_is_answered_first(tmp_path, model):
    url, gate = str(tmp_path / "run"), threading.Event()
    given = settings(url, model, rollout={"flush_interval_s": 0.1})
    with life(given) as server, machines(url, 2, lambda *of: Stalled(build_engine(*of), (1, 2, 3), gate)):
        long = server.windows.ask("long", server.model.prompt((1, 2, 3)), 1)
        wait_until(lambda: holds_run(connect(url)) and exists(connect(url), layout.plan(0)))
        short = [server.ask(key, prompt=f"{key}+1=") for key in ("1", "2")]
        assert all(short)
        assert not long.done()
        # No more windows are open than algorithm.max_staleness allows beside the oldest.
        late = server.windows.ask("late", server.model.prompt("3+1="), 1)
        time.sleep(0.5)
        assert requests_of(url) == [["long"], ["1"], ["2"]]
        gate.set()
        assert long.result(60)
        assert late.result(60)
    assert requests_of(url) == [["long"], ["1"], ["2"], ["late"]]


def test_while_no_member_is_idle_requests_gather_in_one_window(tmp_path, model):
    url, gate = str(tmp_path / "run"), threading.Event()
    given = settings(url, model, rollout={"flush_interval_s": 0.1})
    with life(given) as server, machines(url, 1, lambda *of: Stalled(build_engine(*of), (1, 2, 3), gate)):
        asked = [server.windows.ask("long", server.model.prompt((1, 2, 3)), 1)]
        wait_until(lambda: holds_run(connect(url)) and connect(url).list(layout.alive_all(0)))
        for name in ("1", "2"):
            asked.append(server.windows.ask(name, server.model.prompt(f"{name}+1="), 1))
            time.sleep(1.0)
        assert requests_of(url) == [["long"]]
        gate.set()
        assert all(answer.result(60) for answer in asked)
    assert requests_of(url) == [["long"], ["1", "2"]]


def test_a_server_goes_on_with_every_window_that_an_earlier_life_has_planned(tmp_path, model):
    url = str(tmp_path / "run")
    given = settings(url, model)
    with Rollouts(given) as rollouts:
        for step, name in enumerate(("a", "b")):
            rollouts.submit(step, [{"prompt": name, "prompt_token_ids": [1, step], REQUEST: name}])
    with life(given) as server:
        known = [server.windows.answer(name) for name in ("b", "a")]
        with crew(url):
            assert [answer.result(60).groups[0].prompt for answer in known] == ["b", "a"]
            wait_until(lambda: server.windows.step == 2)
    assert requests_of(url) == [["a"], ["b"]]


def test_an_answer_that_comes_as_the_windows_end_keeps_no_other_request_waiting(tmp_path, model):
    url = str(tmp_path / "run")
    with life(settings(url, model)) as server:
        first, second = (server.windows.ask(name, server.model.prompt("1+1="), 1) for name in "ab")
        first.set_result(None)
        # What a thread saw that looked a moment earlier.
        first.done = lambda: False
        server.windows.end(GroupTimeout("no member came"))
        assert isinstance(second.exception(0), GroupTimeout)
        with crew(url):
            wait_until(lambda: server.windows.step == 1)


def test_a_key_has_one_request(tmp_path, model):
    url = str(tmp_path / "run")
    with life(settings(url, model)) as server, crew(url):
        with pytest.raises(Refusal, match="has the token 99999"):
            server.ask("a", prompt=[99999])
        assert server.ask("a", prompt="1+1=")
        with pytest.raises(Refusal, match="used for another request") as refused:
            server.ask("a", prompt="1+1=", n=2)
        assert refused.value.status == 422


def test_an_iteration_of_another_program_is_left_alone(tmp_path, model):
    url = str(tmp_path / "run")
    with Rollouts(settings(url, model, run=SECTIONS["run"])) as rollouts:
        rollouts.submit(0, ["1+1="])
    with pytest.raises(WrongStep, match="another program's"), life(settings(url, model)):
        pass
