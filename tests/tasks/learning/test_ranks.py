"""Ranks alone, and two of them, as torchrun starts them and on the loopback."""

import signal

import pytest
import torch

from tasks.learning.ranks import Ranks, joined, misses_peer
from tests.forked import ForkedScript
from tests.tasks.learning.launched_ranks import talk_of_ranks
from tests.tasks.learning.lone_rank import ALONE
from tests.tasks.learning.rank_talk import talk

CPU = torch.device("cpu")


def test_alone_everything_comes_back(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with joined(CPU) as ranks:
        assert ranks == Ranks()
        assert ranks.is_first
        ranks.barrier()
        assert talk(ranks) == {
            "sum": [1.5, 0.0],
            "broadcasts": [{"batch": 0, "from": 0}, {"batch": 1, "from": 0}],
            "gathered": [{"rank": 0, "text": "é"}],
            "failure": "ArithmeticError: response 7",
            "unavailable": "StoreUnavailable",
            "not finite": "non-finite loss; responses 9",
            "afterwards": 1.0,
        }
        with pytest.raises(ValueError, match="world_size: value 1; allowed: 2 or more"):
            _ = ranks.mesh


@pytest.mark.slow
def test_two_ranks_hear_each_other_and_a_failure_has_a_rank(tmp_path):
    done, found = talk_of_ranks(tmp_path, 2)
    assert [heard.pop("failure") for heard in found] == [
        "RankError: rank 1 of 2: ArithmeticError: response 7",
        "ArithmeticError: response 7",
    ]
    # A store that does not answer is worth another attempt on whichever rank it happens.
    assert [heard.pop("unavailable") for heard in found] == ["RankUnavailableError", "StoreUnavailable"]
    expected = {
        "sum": [3.0, 1.0],
        "broadcasts": [{"batch": 0, "from": 0}, {"batch": 1, "from": 0}],
        "gathered": [{"rank": 0, "text": "é"}, {"rank": 1, "text": "é" * 10}],
        "not finite": "non-finite loss; responses 8, 9",
        "afterwards": 1.0,
    }
    assert found == [expected, expected]
    assert done.returncode != 0
    assert "rank 1 of 2 failed: LookupError: the second rank is unhappy" in done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("does", sorted(ALONE))
def test_what_a_rank_suffers_from_a_peer_that_is_gone_is_known_as_that(tmp_path, does):
    ranks = [ForkedScript("tests.tasks.learning.lone_rank", str(tmp_path), str(rank), does) for rank in range(2)]
    told = [each.communicate(60)[0] for each in ranks]
    assert ranks[0].returncode == -signal.SIGKILL
    assert told[1].startswith("True "), told[1]


@pytest.mark.slow
def test_a_process_that_has_connected_in_the_place_of_a_rank_is_found(tmp_path):
    ranks = [ForkedScript("tests.tasks.learning.false_rank", str(tmp_path), str(rank)) for rank in range(2)]
    told = [each.communicate(60)[0] for each in ranks]
    assert told[0] == "rank 0 of 2: what has connected as rank 1 is another process\n"


def test_what_a_rank_suffers_by_itself_is_not_that():
    assert not misses_peer(RuntimeError("CUDA error: an illegal memory access was encountered"))
    assert not misses_peer(ValueError("step 3: the loss is nan"))


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE: value 'two' in the environment; allowed: 1 or more"),
        ({"WORLD_SIZE": "2"}, "RANK: value '' in the environment; allowed: 0 to 1, as torchrun sets it"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK: value '2' in the environment; allowed: 0 to 1"),
    ],
)
def test_a_wrong_environment_is_named(monkeypatch, environment, message):
    monkeypatch.delenv("RANK", raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message), joined(CPU):
        pass
