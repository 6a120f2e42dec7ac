"""Which texts a regular expression spells, in the ways in which people write them."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.preparing.pattern_text import spelt

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "<|begin_of_thought|>", "<|im_end|>")


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        (r"<think>.*?</think>\s*<answer>.*?</answer>", TAGS[:4]),
        (r"</?think>", TAGS[:2]),
        (r"<(think|answer)>.*</\1>", ("<think>", "<answer>")),
        (r"\<think\>", ("<think>",)),
        (r"\x3cthink\u003e", ("<think>",)),
        (r"[<][tT]h[i-k]nk[>]", ("<think>",)),
        (r"<\|begin_of_thought\|>.*", ("<|begin_of_thought|>",)),
        # A bar that was meant as it is.
        (r"(?:.*)<|im_end|>", ("<|im_end|>",)),
        (r"(?i)<THINK>", ("<think>",)),
        (r"(?x) < think > # of the policy", ("<think>",)),
        (r"(?!.*<think>).*", ("<think>",)),
        (r"(?<=</think>)x", ("</think>",)),
        (r"(?:<think>){2,}", ("<think>",)),
        (r"(?P<all>(?>\s*<think>)?)(?P=all)", ("<think>",)),
        (r"(a)?(?(1)<think>|</think>)", TAGS[:2]),
        (r"^[^<]*<think>$", ("<think>",)),
        (r".*", ()),
        (r"[\s\S]*", ()),
        (r"[^>]*>", ()),
        (r"<thin.>", ()),
        (r"<[a-z]+>.*</[a-z]+>", ()),
        (r"<thought>.*</thought>", ()),
        (r"", ()),
    ],
)
def test_a_pattern_spells_what_it_names(pattern: str, expected: tuple[str, ...]):
    assert tuple(spelt(pattern, TAGS)) == expected


@given(st.text(min_size=1, max_size=12), st.text(max_size=5), st.text(max_size=5))
def test_an_escaped_text_is_spelt_wherever_it_stands(text: str, before: str, after: str):
    assert spelt(re.escape(before) + re.escape(text) + re.escape(after), [text]) == [text]
    assert spelt(f"{re.escape(before)}(?:x|{re.escape(text)})*?{re.escape(after)}", [text]) == [text]


PATTERNS = st.from_regex(r"(?:[a-d]|\(\?:[a-d]+(?:\|[a-d]*)?\)[*?+]?){1,6}", fullmatch=True)


@given(PATTERNS, st.data())
def test_what_a_pattern_of_letters_matches_it_spells(pattern: str, data: st.DataObject):
    text = data.draw(st.from_regex(pattern, fullmatch=True).filter(bool))
    assert spelt(pattern, [text]) == [text]


def test_repetitions_of_repetitions_end():
    pattern = "a*"
    for _ in range(40):
        pattern = f"(?:{pattern}b?)*"
    assert spelt(pattern, ["a" * 60 + "c", "a" * 60]) == ["a" * 60]
