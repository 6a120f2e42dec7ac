import random
from dataclasses import replace

import numpy as np
import pytest

from tasks.sampling.engines import suffix_drafter
from tasks.sampling.engines.suffix_drafter import SuffixDrafter
from tasks.sampling.engines.testing import request

SUFFIXES = suffix_drafter._SUFFIXES.tolist()


class Plain:
    """What SuffixDrafter does, by a search through everything that it was given, in the order in which it came."""

    def __init__(self, *, siblings=True):
        self.siblings = siblings
        self.sequences, self.scopes, self.came = {}, {}, []

    def start(self, item):
        self.scopes[item.response] = item.prompt_ids if self.siblings else item.response
        self.sequences[item.response] = []
        self.append(item.response, [*item.prompt_ids, *item.generated_ids])

    def append(self, response, tokens):
        for token in tokens:
            self.came.append((response, len(self.sequences[response])))
            self.sequences[response].append(token)

    def draft(self, response, most):
        context = self.sequences[response]
        for suffix in SUFFIXES:
            if suffix > len(context):
                continue
            for other, position in reversed(self.came):
                tokens = self.sequences[other]
                same_scope = self.scopes[other] == self.scopes[response]
                if same_scope and position >= suffix and tokens[position - suffix : position] == context[-suffix:]:
                    found = tokens[position : position + most]
                    while other == response and len(found) < most:
                        found = [*found, *tokens[position:]]
                    return found[:most]
        return []


@pytest.mark.parametrize("siblings", [True, False])
def test_drafts_are_those_of_a_search_through_all_tokens(siblings):
    """Few different tokens repeat often; responses grow in turns and by several tokens, as accepted drafts do."""
    rnd = random.Random(5)
    drafter, wanted = SuffixDrafter(rows=8, context_length=200, siblings=siblings), Plain(siblings=siblings)
    items = [replace(request(r), prompt_ids=tuple(rnd.choices(range(6), k=9))) for r in (0, 4)]
    items = [replace(items[r % 2], response=r, group=r % 2) for r in range(6)]
    live = {item.response: [*item.prompt_ids, *item.generated_ids] for item in items}
    for item in items:
        drafter.start([item], [live[item.response]])
        wanted.start(item)
    longest = 0
    for _ in range(25):
        new = {r: rnd.choices(range(4), k=rnd.randrange(1, 5)) for r in range(6) if rnd.random() < 0.8}
        for r, tokens in new.items():
            live[r] += tokens
            wanted.append(r, tokens)
        found = drafter.draft(range(6), 5)
        # Of several places with equal suffixes the newest counts; order within one call is by response.
        assert found == [wanted.draft(r, 5) for r in range(6)]
        longest = max(longest, *map(len, found))
    assert longest == 5


def started(drafter, *tokens, prompt=(50, 51, 52), first=0):
    """Start these responses; returns requests, and the lists to which an engine appends."""
    items = [replace(request(first + r), prompt_ids=prompt, generated_ids=tuple(one)) for r, one in enumerate(tokens)]
    live = [[*prompt, *one] for one in tokens]
    drafter.start(items, live)
    return items, live


def test_a_response_is_drafted_from_its_siblings_running_and_finished():
    drafter = SuffixDrafter(rows=4, context_length=64)
    _, live = started(drafter, [1, 2, 3, 4, 5, 6, 7], [9, 8, 2, 3], [20, 21])
    assert drafter.draft([1, 2], 3) == [[4, 5, 6], []]
    live[0] += [30, 31]
    drafter.leave([0])
    live[1] += [4, 5, 6, 7]
    assert drafter.draft([1], 8) == [[30, 31]]


def test_responses_to_other_prompts_do_not_count_and_later_iterations_do():
    drafter = SuffixDrafter(rows=4, context_length=64)
    started(drafter, [1, 2, 3, 4, 5])
    started(drafter, [7, 1, 2, 3], prompt=(50, 51, 53), first=1)
    assert drafter.draft([1], 4) == [[]]
    drafter.leave([0, 1])
    started(drafter, [9, 9, 2, 3], first=0)
    assert drafter.draft([0], 4) == [[4, 5]]
    alone = SuffixDrafter(rows=4, context_length=64, siblings=False)
    started(alone, [1, 2, 3, 4, 5], [7, 2, 3], [2, 3, 8, 2, 3])
    assert alone.draft([1, 2], 4) == [[], [8, 2, 3, 8]]


def test_the_longest_suffix_wins_over_a_newer_place():
    drafter = SuffixDrafter(rows=4, context_length=64)
    started(drafter, [1, 2, 3, 4, 5], [9, 3, 4, 6], [8, 2, 3, 4])
    assert drafter.draft([2], 1) == [[5]]


def test_past_responses_draft_for_their_prompt():
    drafter = SuffixDrafter(rows=2, context_length=32)
    prompt = (50, 51, 52)
    drafter.remember(prompt, [[1, 2, 3], [4, 5, 6, 7]])
    drafter.remember((50, 51, 53), [[1, 2, 99]])
    drafter.remember(prompt, [range(100)])
    started(drafter, [])
    assert drafter.draft([0], 2) == [[0, 1]]
    started(drafter, [4, 5], first=1)
    assert drafter.draft([0, 1], 2) == [[4, 5], [6, 7]]


def test_a_response_that_comes_back_after_a_turn_goes_on_in_its_sequence():
    drafter = SuffixDrafter(rows=2, context_length=64)
    items, live = started(drafter, [1, 2, 3])
    live[0] += [4, 5]
    drafter.leave([0])

    def back(*tokens):
        drafter.start([replace(items[0], generated_ids=tokens)], [[*items[0].prompt_ids, *tokens]])

    back(1, 2, 3, 4, 5, 40, 41, 2, 3)
    assert drafter.draft([0], 3) == [[4, 5, 40]]
    assert len(drafter._empty) == len(drafter._lengths) - 1
    drafter.leave([0])
    back(1, 9, 3)
    assert len(drafter._empty) == len(drafter._lengths) - 2


def test_only_what_is_asked_for_enters_the_tables():
    """Responses to other prompts, whether in flight, finished or remembered, cost no work until then."""
    drafter = SuffixDrafter(rows=8, context_length=64)
    _, live = started(drafter, [1, 2, 3, 4])
    started(drafter, [1, 2, 3, 5], [6, 7, 8], prompt=(60, 61), first=1)
    drafter.remember((60, 61), [[6, 7, 8, 9]])
    drafter.leave([1])
    drafter.draft([0], 2)
    indexed = drafter._indexed[drafter._lengths > 0]
    assert sorted(indexed) == [0, 0, 7]
    live[0] += [2, 3]
    assert drafter.draft([0, 2], 2) == [[4, 2], [9]]
    assert drafter._indexed.sum() == drafter._lengths.sum() > 20
    assert list(drafter._open) == [drafter._scope((50, 51, 52), 0), drafter._scope((60, 61), 2)]
    drafter.leave([0, 2])
    started(drafter, [1], first=5)
    drafter.draft([5], 1)
    assert [len(each) for each in drafter._open.values()] == [1, 1], "one in flight, one that has left unasked"


def test_memory_is_bounded_and_what_was_left_longest_ago_goes_first(monkeypatch):
    monkeypatch.setattr(suffix_drafter, "_SEQUENCES_MAX", 16)
    drafter = SuffixDrafter(rows=2, context_length=32)
    places = drafter._places.nbytes
    for response in range(100):
        started(drafter, [response, response + 1, 7, 8], first=response, prompt=(60, 61, 62))
        drafter.leave([response])
        drafter.remember((1, response), [[1, 2]])
    assert len(drafter._lengths) == 16
    assert len(drafter._open) <= 16
    assert drafter._places.nbytes == places
    started(drafter, [90, 91], [10, 11], prompt=(60, 61, 62))
    assert drafter.draft([0, 1], 3) == [[], []]
    started(drafter, [98, 99], first=2, prompt=(60, 61, 62))
    assert drafter.draft([2], 3) == [[7, 8]]
    with pytest.raises(KeyError):
        drafter.draft([99], 3)


@pytest.mark.parametrize(
    ("rows", "context_length", "sequences"), [(64, 1 << 8, 1 << 12), (64, 1 << 15, 512), (64, 1 << 18, 128)]
)
def test_there_is_room_for_so_many_tokens_or_two_sequences_per_row(rows, context_length, sequences):
    drafter = SuffixDrafter(rows=rows, context_length=context_length)
    assert len(drafter._lengths) == sequences
    assert drafter._places.nbytes <= 50 << 20


def test_equal_hashes_give_no_wrong_draft(monkeypatch):
    monkeypatch.setattr(suffix_drafter, "_BUCKETS_MAX", 1)
    drafter = SuffixDrafter(rows=2, context_length=64)
    started(drafter, [1, 2, 3, 4], [2, 9])
    assert drafter.draft([0, 1], 3) == [[], []]
    assert np.all(drafter._places >= 0)
