"""A key has one answer: whatever the server's deaths, and whichever life of the server is asked."""

from contextlib import suppress

import pytest

from storage.records import layout, prompt_table
from storage.records.run import exists, read_plan
from storage.stores.connect import connect
from tasks.external.plans import WrongStep
from tasks.external.rollouts import Rollouts
from tasks.serving.windows import REQUEST
from tasks.turns.chat_request import Refusal
from tests.dying_store import Killed, ProgramDies
from tests.served_run import SECTIONS, crew, life, seen, settings
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
    name = "served-undisturbed"
    undisturbed = ProgramDies(name, {})
    memory_store(name, undisturbed)
    with crew(f"memory://{name}"):
        expected = answers(settings(f"memory://{name}", model))
    assert len(expected) == len(ASKED)
    assert len(undisturbed.written) > 40
    tokens = {key: [each[1:] for each in answer] for key, answer in expected.items()}
    for at, key in list(enumerate(undisturbed.written))[::4]:
        name = f"served-{at}"
        store = ProgramDies(name, {}, writes=at)
        memory_store(name, store)
        given, first = settings(f"memory://{name}", model), {}
        with crew(f"memory://{name}"):
            with suppress(Killed):
                first = answers(given)
            store.left = 1 << 30
            second = answers(given)
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
