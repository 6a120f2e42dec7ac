import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.prompts.order import position_before, prompt_index


@given(size=st.integers(1, 200), seed=st.integers(0, 2**40), epoch=st.integers(0, 1000), shuffle=st.booleans())
def test_every_epoch_is_a_permutation(size: int, seed: int, epoch: int, shuffle: bool):
    seen = [prompt_index(epoch * size + offset, size, seed, shuffle) for offset in range(size)]
    assert {e for e, _ in seen} == {epoch}
    assert sorted(index for _, index in seen) == list(range(size))


@given(size=st.integers(1, 50), seed=st.integers(0, 9), positions=st.lists(st.integers(0, 500), max_size=30))
def test_the_position_alone_decides(size: int, seed: int, positions: list[int]):
    straight = [prompt_index(position, size, seed, shuffle=True) for position in range(501)]
    assert [prompt_index(position, size, seed, shuffle=True) for position in positions] == [
        straight[position] for position in positions
    ]


def test_the_order_never_changes_silently():
    assert [prompt_index(position, 8, 3, shuffle=True)[1] for position in range(10)] == [0, 4, 7, 1, 5, 6, 3, 2, 0, 6]


def test_epochs_and_seeds_differ():
    def epoch_order(seed: int, epoch: int) -> list[int]:
        return [prompt_index(epoch * 100 + offset, 100, seed, shuffle=True)[1] for offset in range(100)]

    assert len({tuple(epoch_order(seed, epoch)) for seed in range(4) for epoch in range(4)}) == 16


def test_without_shuffle_rows_come_in_file_order():
    assert [prompt_index(position, 3, 0, shuffle=False) for position in range(5)] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (1, 0),
        (1, 1),
    ]


@pytest.mark.parametrize(("position", "size", "name"), [(-1, 3, "position"), (0, 0, "size")])
def test_impossible_arguments_are_refused(position: int, size: int, name: str):
    with pytest.raises(ValueError, match=f"{name}: value"):
        prompt_index(position, size, 0, shuffle=True)


@given(size=st.integers(1, 60), seed=st.integers(0, 9), position=st.integers(0, 400), shuffle=st.booleans())
def test_the_position_before_is_that_of_the_same_prompt_one_epoch_earlier(size, seed, position, shuffle):
    epoch, index = prompt_index(position, size, seed, shuffle)
    before = position_before(position, size, seed, shuffle)
    if epoch == 0:
        assert before is None
    else:
        assert prompt_index(before, size, seed, shuffle) == (epoch - 1, index)
