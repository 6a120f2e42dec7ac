import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.prompt_table import PromptRow, decode_prompts, encode_prompts
from storage.shard import Finish, Row, encode_shard
from storage.store import CorruptObject

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda leaf: st.lists(leaf, max_size=3),
    max_leaves=5,
)
ROWS = st.builds(
    PromptRow,
    st.text(st.characters(codec="utf-8"), max_size=8),
    st.lists(st.integers(0, 2**32 - 1), max_size=12).map(tuple),
    st.text(st.characters(codec="utf-8"), max_size=8) | st.just([{"role": "user", "content": "é"}]),
    st.dictionaries(st.text(st.characters(codec="utf-8"), max_size=4), JSON, max_size=3),
)


@pytest.mark.slow
@given(st.lists(ROWS, max_size=5))
def test_round_trip(rows):
    assert decode_prompts("k", encode_prompts(rows)) == rows


def test_damage_and_other_objects_are_refused_by_name():
    body = encode_prompts([PromptRow("a", (1, 2), "x", {})])
    with pytest.raises(CorruptObject, match="'p'"):
        decode_prompts("p", body[:-1])
    shard = encode_shard([Row(0, 1, 0, np.zeros(1, np.uint32), np.zeros(1, np.float32), 0, Finish.STOP)])
    with pytest.raises(CorruptObject, match="this Gleaner reads"):
        decode_prompts("p", shard)
