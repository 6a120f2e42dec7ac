"""Pieces of a text: they add up to it, whatever the tokenizer does with bytes and spaces."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resources.visible_text import visible
from tasks.viewing.token_pieces import stretch_texts, token_texts


def by_bytes(ids):
    """One token is one byte, as in the worst case of a byte-level tokenizer."""
    return bytes(ids).decode("utf-8", errors="replace")


def by_words(ids):
    """As SentencePiece does, a space before the first word is dropped."""
    return "".join(f" w{token}" for token in ids).removeprefix(" ")


@given(st.text(max_size=40), st.lists(st.integers(0, 20), max_size=4))
def test_stretches_add_up_to_the_text_wherever_they_are_divided(text, cuts):
    ids = list(text.encode("utf-8", errors="ignore"))
    bounds = sorted(min(cut, len(ids)) for cut in cuts)
    lengths = [b - a for a, b in zip([0, *bounds], [*bounds, len(ids)], strict=True)]
    pieces = stretch_texts(by_bytes, ids, lengths)
    assert len(pieces) == len(lengths)
    assert "".join(pieces) == by_bytes(ids)


@given(st.text(max_size=40))
def test_tokens_add_up_to_the_text(text):
    ids = list(text.encode("utf-8", errors="ignore"))
    assert "".join(token_texts(by_bytes, ids)) == by_bytes(ids)


def test_a_character_belongs_to_the_token_that_completes_it():
    ids = list("aé€".encode())
    assert token_texts(by_bytes, ids) == ["a", "", "é", "", "", "€"]
    assert stretch_texts(by_bytes, ids, [2, 4]) == ["a", "é€"]


def test_a_decoder_that_drops_the_first_space_loses_none_between_tokens():
    assert token_texts(by_words, [1, 2, 3]) == ["w1", " w2", " w3"]
    assert stretch_texts(by_words, [1, 2, 3], [1, 2]) == ["w1", " w2 w3"]


def test_bytes_that_never_become_a_character_do_not_hide_what_follows():
    ids = [0xFF] * 20 + list(b"end")
    assert "".join(token_texts(by_bytes, ids)).endswith("end")
    assert token_texts(by_bytes, [0xFF])[-1] == "\ufffd"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\x1b[31mred\x07", "\\x1b[31mred\\x07"),
        ("\r\x9b2J", "\\x0d\\x9b2J"),
        ("a\u202eb\ud800", "a\\u202eb\\ud800"),
        ("<script>", "<script>"),
    ],
)
def test_control_characters_are_written_out(text, shown):
    assert visible(text) == shown
