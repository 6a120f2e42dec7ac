"""Token ids as text in pieces: a piece for each token, or for each stretch of a response. Pieces add up to the text."""

from collections.abc import Sequence

from tasks.prompts.decode import Decode

# What a decoder gives for bytes that are not yet a character.
INCOMPLETE = "\ufffd"
# A character has at most four bytes, each of which may be a token of its own.
CONTEXT = 8


def stretch_texts(decode: Decode, token_ids: Sequence[int], lengths: Sequence[int]) -> list[str]:
    """The text of consecutive stretches with so many tokens; a character across a boundary belongs to the later one.

    The texts add up to that of all tokens, whatever the decoder does with spaces.
    """
    whole = decode(token_ids)
    texts: list[str] = []
    begun, end = 0, 0
    for length in lengths[:-1]:
        end += length
        before = decode(token_ids[:end]).rstrip(INCOMPLETE)
        until = max(begun, _shared(before, whole))
        texts.append(whole[begun:until])
        begun = until
    return [*texts, whole[begun:]] if lengths else []


def token_texts(decode: Decode, token_ids: Sequence[int]) -> list[str]:
    """The text of each token: what it adds to the text before it.

    Of the tokens of one character, all but the last add nothing. Each token is decoded with the few before it, because
    decoders treat the first one of a text differently.
    """
    texts: list[str] = []
    first, read = 0, 0
    for end in range(1, len(token_ids) + 1):
        found = decode(token_ids[first:end])
        if found.endswith(INCOMPLETE) and end - read < CONTEXT and end < len(token_ids):
            texts.append("")
            continue
        before = decode(token_ids[first:read])
        texts.append(found[_shared(before, found) :])
        first, read = read, end
    return texts


def _shared(one: str, other: str) -> int:
    """How many characters both texts begin with."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if one[:middle] == other[:middle] else (low, middle - 1)
    return low
