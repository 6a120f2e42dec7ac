"""How environments in real child processes end, and how they come back."""

import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from resources.process import descendants
from storage.digests import digest_of
from storage.journal.shard import Finish
from storage.journal.turns import decode_turn, encode_turn
from storage.stores.store import StoreUnavailable
from tasks.configuration.turns import TurnsConfig
from tasks.turns.living_environments import Reset
from tasks.turns.opened_environments import ProcessEnvironments
from tasks.turns.testing import answered, record_of
from tests.character_turns import STOP, CharacterConversation, said, text_of, then, walk
from tests.processes import are_gone, command, wait_until

pytestmark = pytest.mark.slow
Open = Callable[..., ProcessEnvironments]
RESET = Reset({"start": 3, "more": "m"}, 99, "from 3")
COUNTS = ['!count {"n": 1}', "!nothing", '!count {"n": 5}\n!count {"n": 7}', "done"]


class Objects(dict[str, bytes]):
    """States by digest, as a member has stored them."""

    def read(self, iteration: int, digest: str) -> bytes:
        assert iteration == 2
        return self[digest]


@pytest.fixture
def opened(notes: Callable[[], list[str]]) -> Iterator[Open]:
    every: list[ProcessEnvironments] = []

    def opened(environment: str, reset: Reset = RESET, objects: Objects | None = None, **settings: Any) -> Any:
        config = TurnsConfig(
            environment=f"tests.tool_functions:{environment}",
            **{"processes": 1, **settings},
        )
        found = Objects() if objects is None else objects
        every.append(
            ProcessEnvironments(config, lambda _: CharacterConversation(), [STOP], lambda _: reset, found.read)
        )
        return every[-1]

    yield opened
    for environments in every:
        environments.close()


def kill_workers() -> None:
    gone = [each for each in descendants(os.getpid()) if "environment_worker" in command(each)]
    for each in gone:
        os.kill(each, signal.SIGKILL)
    wait_until(lambda: all(are_gone([each]) for each in gone))


def test_an_environment_is_reset_once_and_kept(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("Counter")
    answers = walk(lambda: environments, COUNTS, [])
    assert [text_of(a) for a in answers] == ["<total 4>\n", text_of(answers[1]), "<total 9><total 16>\n", ""]
    assert [record_of(a).rebuilt for a in answers] == ["new", "kept", "kept", "kept"]
    assert [record_of(a).reward for a in answers] == [None, None, None, 16.0]
    assert [a.finish for a in answers] == [Finish.RUNNING] * 3 + [Finish.STOP]
    assert notes() == ["reset 3 99 ['more']", *["count"] * 3]


def test_coroutines_are_awaited(opened: Open):
    environments = opened("Waiting", Reset({"start": 3}, 99, None))
    answers = walk(lambda: environments, COUNTS, [])
    assert [text_of(answers[0]), record_of(answers[-1]).reward] == ["<4>\n", 8.0]


@pytest.mark.parametrize(
    ("environment", "settings", "how"),
    [
        ("Stateful", {}, "state"),
        ("Large", {}, "state"),
        ("Restoring", {}, "restored"),
        ("Counter", {"replay": True}, "replayed"),
    ],
)
@pytest.mark.parametrize("cut", [1, 2, 3])
def test_another_member_goes_on_where_the_first_stopped(
    opened: Open, environment: str, settings: dict[str, Any], how: str, cut: int
):
    objects = Objects()

    def kept(answers: list[Any]) -> list[Any]:
        return [(a.token_ids, a.finish, record_of(a).reward, record_of(a).state) for a in answers]

    def opened_again() -> ProcessEnvironments:
        return opened(environment, objects=objects, **settings)

    undisturbed = walk(opened_again, COUNTS, [])
    for answer in undisturbed:
        objects |= dict(answer.objects)
    disturbed = walk(opened_again, COUNTS, [cut])
    assert kept(disturbed) == kept(undisturbed)
    # A turn without a valid call needs no environment.
    assert how in [record_of(answer).rebuilt for answer in disturbed]
    assert not any(record_of(answer).diverged for answer in disturbed)


def test_recorded_turns_call_nothing_where_a_class_can_be_restored(opened: Open, notes: Callable[[], list[str]]):
    walk(lambda: opened("Restoring"), COUNTS, [2])
    assert notes().count("count") == 3
    (told,) = [line for line in notes() if line.startswith("restore")]
    assert told == 'restore [{"calls": [{"name": "count", "arguments": {"n": 1}, "result": "total 4"}]}, {"calls": []}]'


def test_large_states_are_objects(opened: Open):
    environments = opened("Large")
    answer = answered(environments, said(COUNTS[0]))
    ((digest, body),) = answer.objects
    assert digest == digest_of(body)
    assert (record_of(answer).state, record_of(answer).state_object) == (None, digest)
    # In this process it needs not be stored to be used.
    kill_workers()
    second = answered(environments, then(said(COUNTS[0]), answer, '!count {"n": 1}'))
    assert text_of(second) == "<total 5>\n"


@pytest.mark.parametrize("stored", [(), (b"{}",)])
def test_a_state_that_cannot_be_read_begins_again(opened: Open, stored: tuple[bytes, ...]):
    answer = answered(opened("Large"), said(COUNTS[0]))
    digest = answer.objects[0][0]
    other = opened("Large", objects=Objects(zip([digest], stored, strict=False)))
    again = answered(other, then(said(COUNTS[0]), answer, '!count {"n": 1}'))
    assert again.finish is Finish.AGAIN
    assert f"its state {digest}" in str(record_of(again).failure)


def test_a_state_is_read_again_when_the_store_does_not_answer(opened: Open):
    answer = answered(opened("Large"), said('!count {"n": 2}'))
    objects, refused = Objects(answer.objects), []

    class Late(Objects):
        def read(self, iteration: int, digest: str) -> bytes:
            if len(refused) < 2:
                refused.append(digest)
                raise StoreUnavailable("no answer")
            return objects.read(iteration, digest)

    after = answered(opened("Large", objects=Late()), then(said('!count {"n": 2}'), answer, '!count {"n": 1}'))
    assert (after.finish, record_of(after).rebuilt, len(refused)) == (Finish.RUNNING, "state", 2)


def test_environments_that_are_left_are_closed_at_the_end(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("Closing")
    for response in range(3):
        answered(environments, said('!count {"n": 2}', response))
    environments.close()
    assert notes().count("closed") == 3


def test_what_cannot_be_rebuilt_begins_again_until_it_is_given_up(opened: Open):
    turn = said(COUNTS[0])
    first = answered(opened("Counter"), turn)
    other = opened("Counter")
    for restarts, finish in enumerate([Finish.AGAIN, Finish.AGAIN, Finish.FAILED]):
        answer = answered(other, then(turn, first, '!count {"n": 1}', restarts=restarts))
        assert (answer.finish, answer.token_ids) == (finish, ())
        assert record_of(answer).failure
        assert record_of(answer).reward is None
    # The response that begins again has an environment that does, too.
    assert text_of(answered(other, said(COUNTS[0], restarts=1))) == "<total 4>\n"


@pytest.mark.parametrize("environment", ["Stateful", "Restoring"])
def test_an_environment_that_dies_is_rebuilt_and_the_call_made_once_more(opened: Open, environment: str):
    environments = opened(environment)
    answers = walk(lambda: environments, ['!count {"n": 1}', '!count {"n": 1}\n!die\n!count {"n": 1}', "done"], [])
    assert text_of(answers[1]) == "<total 5><alive at 5><total 6>\n"
    assert [call.outcome for call in record_of(answers[1]).calls] == ["answered"] * 3
    assert record_of(answers[2]).reward == 6.0


def test_an_environment_that_dies_and_cannot_be_rebuilt_begins_again(opened: Open):
    environments = opened("Counter")
    answer = answered(environments, said('!count {"n": 1}\n!die'))
    assert answer.finish is Finish.AGAIN
    assert [call.name for call in record_of(answer).calls] == ["count"]


def test_a_first_call_that_kills_its_environment_is_answered_as_lost(opened: Open):
    answer = answered(opened("Stateful"), said('!die_always\n!count {"n": 1}'))
    assert text_of(answer) == "<error: the tool's process ended with status 9><total 4>\n"
    assert [call.outcome for call in record_of(answer).calls] == ["lost", "answered"]


def test_a_call_that_hangs_loses_its_environment_and_no_other(opened: Open):
    environments = opened("Stateful", call_time_limit_s=2.0)
    turns = [said('!count {"n": 1}', 0), said('!count {"n": 2}', 1)]
    answers = [answered(environments, turn) for turn in turns]
    late = answered(environments, then(turns[0], answers[0], '!sleep {"seconds": 1000}\n!count {"n": 1}'))
    assert text_of(late) == "<error: timed out after 2 s><total 5>\n"
    assert record_of(late).rebuilt == "state"
    assert text_of(answered(environments, then(turns[1], answers[1], '!count {"n": 1}'))) == "<total 6>\n"


def test_environments_that_cannot_be_rebuilt_stay_where_another_has_hung(opened: Open):
    environments = opened("Counter", call_time_limit_s=2.0)
    turns = [said('!count {"n": 1}', 0), said('!count {"n": 2}', 1)]
    answers = [answered(environments, turn) for turn in turns]
    hung = then(turns[0], answers[0], '!sleep {"seconds": 1000}')
    late = answered(environments, hung)
    assert text_of(late) == "<error: timed out after 2 s>\n"
    assert answered(environments, then(hung, late, '!count {"n": 1}')).finish is Finish.AGAIN
    assert text_of(answered(environments, then(turns[1], answers[1], '!count {"n": 1}'))) == "<total 6>\n"


def test_an_environment_that_answers_otherwise_has_diverged(opened: Open):
    answers = walk(lambda: opened("Drifting", replay=True), ['!count {"n": 1}', '!count {"n": 1}'], [1])
    assert answers[1].finish is Finish.AGAIN
    assert record_of(answers[1]).diverged
    assert "gave another result" in str(record_of(answers[1]).failure)


def test_a_reset_that_returns_another_text_has_diverged(opened: Open):
    answer = answered(opened("Counter", replace(RESET, opening="from 4")), said(COUNTS[0]))
    assert (answer.finish, record_of(answer).diverged) == (Finish.AGAIN, True)
    again = answered(opened("Counter", replace(RESET, opening=None)), said(COUNTS[0], restarts=2))
    assert (again.finish, record_of(again).diverged) == (Finish.FAILED, True)


@pytest.mark.parametrize(
    ("environment", "text", "why"),
    [
        ("Broken", '!count {"n": 1}', "it cannot be built: RuntimeError: no such server"),
        ("Wordless", '!count {"n": 1}', "it cannot be built: reset returned int; allowed: str or None"),
        ("NoState", '!count {"n": 1}', "get_state returned what is no JSON"),
        ("Greedy", "done", "get_reward returned nan; allowed: a finite number or None"),
        ("Unrewarding", "done", "ValueError: no answer yet"),
    ],
)
def test_an_environment_that_fails_is_never_a_reward(opened: Open, environment: str, text: str, why: str):
    answer = answered(opened(environment), said(text))
    assert answer.finish is Finish.AGAIN
    assert str(record_of(answer).failure).startswith(why)
    assert record_of(answer).reward is None


def test_environments_end_with_their_responses(opened: Open, notes: Callable[[], list[str]]):
    environments = opened("Closing")
    answered(environments, said(COUNTS[0], 0))
    answered(environments, said("done", 1))
    wait_until(lambda: notes().count("closed") == 1)
    environments.forget([0])
    wait_until(lambda: notes().count("closed") == 2)


def test_a_response_that_was_elsewhere_meanwhile_is_rebuilt(opened: Open):
    """What this process still has of it is older than the journal."""
    environments, elsewhere = opened("Stateful"), opened("Stateful")
    turn = said(COUNTS[0])
    first = answered(environments, turn)
    second_turn = then(turn, first, '!count {"n": 10}')
    second = answered(elsewhere, second_turn)
    third = answered(environments, then(second_turn, second, '!count {"n": 100}'))
    assert (text_of(third), record_of(third).rebuilt) == ("<total 114>\n", "state")


def test_a_replay_compares_results_that_were_cut(opened: Open):
    turn = said(COUNTS[0])
    first = answered(opened("Counter"), turn)
    record = record_of(first)
    call = replace(record.calls[0], result="tot\n[cut: the result is longer than allowed]")
    cut = replace(first, event=encode_turn(replace(record, calls=(call,))))
    second = answered(opened("Counter", replay=True), then(turn, cut, '!count {"n": 1}'))
    assert (text_of(second), decode_turn(second.event).rebuilt) == ("<total 5>\n", "replayed")
