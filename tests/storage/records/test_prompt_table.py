from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from storage.journal.shard import Finish, Row, encode_shard
from storage.records.prompt_table import PromptRow, decode_prompts, encode_prompts, read_prompts
from storage.stores.memory import MemoryStore
from storage.stores.store import CorruptObject
from tests.committed_runs import PROMPTS, plan_iteration

ROOT = Path(__file__).parents[3]
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


def test_another_table_under_the_name_in_a_plan_is_refused():
    store = MemoryStore()
    plan, other = (plan_iteration(store, iteration) for iteration in (0, 1))
    assert read_prompts(store, plan) == PROMPTS
    exchanged = encode_prompts(PROMPTS[::-1])
    assert decode_prompts("k", exchanged) == PROMPTS[::-1]
    store.put(plan.prompts_key, exchanged)
    with pytest.raises(CorruptObject, match="do not have the digest in its name") as caught:
        read_prompts(store, plan)
    assert caught.value.key == plan.prompts_key
    with pytest.raises(CorruptObject, match="do not have the digest in its name"):
        read_prompts(store, replace(other, iteration=2))


def test_no_reader_of_prompts_goes_around_the_check():
    sources = [*ROOT.glob("tasks/**/*.py"), *ROOT.glob("storage/**/*.py"), ROOT / "gleaner.py"]
    assert [path.name for path in sources if "decode_prompts" in path.read_text(encoding="utf-8")] == [
        "prompt_table.py"
    ]
