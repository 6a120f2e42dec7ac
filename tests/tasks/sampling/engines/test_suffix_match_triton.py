"""The kernels that find drafts against a definition in plain Python, in Triton's interpreter; and the compiler's word.

The interpreter must be chosen before anybody imports Triton, so a child process runs these tests once more. Where no
GPU is, the kernels are compiled for one that is not there: the compiler refuses what the interpreter takes.
"""

import importlib.util
import inspect
import random
import re
import sys

import pytest
import torch

from tasks.sampling.engines.sibling_rows import LONGEST, SHORTEST
from tests import vllm_interpreted
from tests.vllm_interpreted import INTERPRETED, run_interpreted

HERE = importlib.util.find_spec("triton") is not None
runs_kernels = pytest.mark.skipif(not INTERPRETED, reason="runs in the child process of another test")
WIDTH = 8
SEEDS = range(48)


@pytest.mark.skipif(INTERPRETED, reason="this is the child process")
@pytest.mark.skipif(vllm_interpreted.MISSING and not HERE, reason="there is no Triton")
def test_in_tritons_interpreter(tmp_path):
    run_interpreted(__file__, tmp_path, 600)


@pytest.mark.skipif(INTERPRETED or HERE, reason="the compiler is in this process")
@pytest.mark.skipif(vllm_interpreted.MISSING, reason=vllm_interpreted.WHY_NOT)
def test_the_compiler_of_another_process(tmp_path):
    run_interpreted(__file__, tmp_path, 600, "-k", "the_compiler_takes", interpret=False)


def defined(rows, slot, candidates, last, most):
    """The drafts of a request, by the words of `propose`. rows: by number, the tokens of each row."""
    text = rows[slot]
    places = [
        (suffix, number != slot, -abs(place - len(text)), place >= len(text), -rank, place, number)
        for rank, number in enumerate(candidates)
        if number >= 0
        for place in range(1, len(rows[number]))
        for suffix in range(SHORTEST, min(LONGEST, place, len(text)) + 1)
        if rows[number][place - suffix : place] == text[len(text) - suffix :]
    ]
    if not places:
        return [last] * most
    *_, place, number = max(places)
    found = rows[number][place:]
    if number == slot:
        return [found[ahead % len(found)] for ahead in range(most)]
    return (found + [last] * most)[:most]


def proposed(flying, ring, candidates, order, *, length, most, drawn=None):
    """What the kernels propose, by position in the order; rows as lists of tokens, filled up with a common token."""
    from tasks.sampling.engines import suffix_match_triton  # noqa: PLC0415 - Triton may be missing

    def table(rows):
        cells = torch.full((len(rows), length), 1, dtype=torch.int32)
        for row, tokens in enumerate(rows):
            cells[row, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return cells, torch.tensor([len(tokens) for tokens in rows], dtype=torch.int32)

    rows = suffix_match_triton.Rows(*table(flying), *table(ring))
    last = torch.tensor([tokens[-1] if tokens else 0 for tokens in flying])
    drafts = torch.full((len(flying), most), -7)
    suffix_match_triton.propose(
        rows,
        torch.tensor(order, dtype=torch.int32),
        torch.tensor(candidates, dtype=torch.int32),
        max(sum(number >= 0 for number in row) for row in candidates) or 1,
        torch.tensor([1] * len(order) if drawn is None else drawn, dtype=torch.int32),
        last,
        torch.full((len(flying), len(candidates[0])), 1 << 62),
        drafts,
    )
    assert (drafts[len(order) :] == -7).all()
    return drafts[: len(order)].tolist()


def random_case(seed):
    """Rows over few tokens, of any length, so that suffixes of all lengths are found and rows end beside others."""
    rnd = random.Random(seed)
    length = rnd.choice((5, 16, 40, 1100))
    vocab = rnd.choice((2, 3, 8))
    text = [rnd.randrange(vocab) for _ in range(length)]

    def row(least):
        # Long rows end on both sides of the kernel's first block.
        tokens = text[: rnd.randint(max(least, length - 150), length)]
        return [token if rnd.random() < 0.95 else rnd.randrange(vocab) for token in tokens]

    flying, ring = [row(1) for _ in range(rnd.randint(1, 6))], [row(0) for _ in range(rnd.randint(1, 4))]
    numbers = range(len(flying) + len(ring))
    candidates = []
    for slot in range(len(flying)):
        those = rnd.sample(numbers, rnd.randint(0, min(len(numbers), WIDTH - 1)))
        those += [] if slot in those or rnd.random() < 0.2 else [slot]
        candidates.append(those + [-1] * (WIDTH - len(those)))
    order = rnd.sample(range(len(flying)), rnd.randint(1, len(flying)))
    return flying, ring, candidates, order, length, rnd.randint(1, 8)


def differs(seed):
    """Whether the kernels propose other drafts than the definition."""
    flying, ring, candidates, order, length, most = random_case(seed)
    found = proposed(flying, ring, candidates, order, length=length, most=most)
    rows = [*flying, *ring]
    return found != [defined(rows, slot, candidates[slot], flying[slot][-1], most) for slot in order]


@runs_kernels
@pytest.mark.parametrize("seed", SEEDS)
def test_any_rows_give_the_drafts_of_the_definition(seed):
    assert not differs(seed)


@runs_kernels
def test_random_rows_have_places_of_every_kind():
    """Else the comparison above would compare little."""
    kinds = set()
    for seed in SEEDS:
        flying, ring, candidates, order, _, most = random_case(seed)
        rows = [*flying, *ring]
        for slot in order:
            wanted = defined(rows, slot, candidates[slot], -1, most)
            alone = defined(rows, slot, [slot], -1, most)
            kinds.add((wanted == [-1] * most, -1 in wanted, wanted == alone))
    assert len(kinds) >= 5


@runs_kernels
def test_the_longest_suffix_wins_and_then_other_rows_and_then_the_nearest_place_and_then_the_earlier_candidate():
    text = [1, 2, 3, 4, 1, 2, 3]
    short, long, near = [7, 2, 3, 40, 41], [8, 1, 2, 3, 50, 51], [5, 1, 2, 3, 60, 1, 2, 3, 61, 62, 1, 2, 3, 63]
    rows = [text, short, long, near]

    def first(*candidates):
        table = [[*candidates, *[-1] * (8 - len(candidates))]] * 4
        return proposed(rows, [[]], table, [0], length=16, most=2)[0]

    assert first(1, 2, 0) == [50, 51]
    assert first(0, 1) == [4, 1]
    assert first(0, 2) == [50, 51]
    assert first(2, 3, 0) == first(3, 0, 2) == [61, 62]
    rows[1] = [8, 1, 2, 3, 51, 50]
    assert first(1, 2) == [51, 50]
    assert first(2, 1) == [50, 51]
    assert first(1) == [51, 50]
    rows[1] = [9]
    assert first(1) == [3, 3]


@runs_kernels
def test_a_response_that_repeats_itself_goes_on_round_and_round():
    text = [4, 5, 6, 4, 5, 6, 4, 5]
    assert proposed([text], [[]], [[0, -1]], [0], length=16, most=8) == [[6, 4, 5, 6, 4, 5, 6, 4]]


@runs_kernels
def test_a_request_without_a_drawn_token_gets_its_last_token():
    rows = [[1, 2, 3, 1, 2], [1, 2, 3, 1, 2]]
    found = proposed(rows, [[]], [[0, -1], [1, -1]], [1, 0], length=8, most=2, drawn=[0, 1])
    assert found == [[2, 2], [3, 1]]


FAULTS = {
    "reads beyond a row's end": ("equal = place < held", "equal = place < length"),
    "takes beyond a row's end": ("(place + offset < held)", "(place + offset < length)"),
    "looks in the row beside the candidate": (
        "first = flying + other * length",
        "first = flying + (slots - 1) * length",
    ),
    "takes a suffix that is too short": ("suffix >= shortest", "suffix >= 1"),
    "stops after a block": ("range(0, held, block)", "range(0, block, block)"),
    "goes on where tokens differ": ("equal = equal & (tl.load(", "equal = equal & (place >= 0) | (tl.load("),
    "reads ahead of its own first token": ("mask=own_length >= back, other=-1", "mask=own_length >= 0, other=-1"),
}


@runs_kernels
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found(tmp_path, monkeypatch, fault):
    """The comparison above with a kernel that has the fault."""
    from tasks.sampling import engines  # noqa: PLC0415 - Triton may be missing
    from tasks.sampling.engines import suffix_match_triton  # noqa: PLC0415

    text = inspect.getsource(suffix_match_triton)
    right, wrong = FAULTS[fault]
    assert right in text
    file = tmp_path / "faulty.py"
    file.write_text(text.replace(right, wrong))
    spec = importlib.util.spec_from_file_location("faulty", file)
    faulty = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "faulty", faulty)
    spec.loader.exec_module(faulty)
    monkeypatch.setattr(engines, "suffix_match_triton", faulty)
    assert any(map(differs, SEEDS))


@pytest.mark.skipif(INTERPRETED or not HERE, reason="needs Triton's compiler")
@pytest.mark.parametrize("most", [1, 8])
@pytest.mark.parametrize("kernel", ["_score_rows", "_take_best"])
def test_the_compiler_takes_the_kernels(tmp_path, monkeypatch, kernel, most):
    from triton.backends import backends  # noqa: PLC0415
    from triton.backends.compiler import GPUTarget  # noqa: PLC0415
    from triton.compiler import ASTSource, compile  # noqa: A004, PLC0415

    from tasks.sampling.engines import suffix_match_triton  # noqa: PLC0415

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.delitem(backends, "cpu", raising=False)
    function = getattr(suffix_match_triton, kernel)
    constants = {
        "_score_rows": {"width": 32, "shortest": SHORTEST, "longest": LONGEST, "block": 1024},
        "_take_best": {"width": 32, "most": most, "most_padded": most},
    }[kernel]
    wide = dict.fromkeys(("last", "scores", "drafts"), "*i64")
    types = dict.fromkeys(function.arg_names, "*i32") | {k: v for k, v in wide.items() if k in function.arg_names}
    numbers = dict.fromkeys(("slots", "length", "columns"), "i32")
    types |= {k: v for k, v in numbers.items() if k in function.arg_names} | dict.fromkeys(constants, "constexpr")
    compiled = compile(ASTSource(function, types, constants), target=GPUTarget("cuda", 90, 32))
    assert re.search(r"\.target sm_90", compiled.asm["ptx"])
