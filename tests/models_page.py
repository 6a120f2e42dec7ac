"""The table of docs/guide/models.md: what it says, what is found here, and how it is written anew."""

import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from storage.records.records import SamplingParams
from tasks.configuration.trainer import TrainerConfig
from tasks.learning.batching import collate
from tasks.learning.policy import Policy
from tasks.learning.pretrained import read_tensors
from tasks.sampling.engines.engine import Engine, GenerationRequest
from tasks.sampling.engines.weight_tensors import as_torch
from tests.model_families import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "guide" / "models.md"
WRITES = "WRITE_MODELS_PAGE"
RIGHT, TOLERANCE = "right", 3e-5
COLUMNS = ("family", "trainer", "torch engine", "vLLM")
_ROW = re.compile(r"^\| (.+) \| (.+) \| (.+) \| (.+) \|$", re.MULTILINE)
Plain = Callable[[Path, Sequence[int]], list[float]]
_PROMPT, _COMPLETION = (5, 6, 7), (9, 10, 11, 12, 13, 14)


def plain_logprobs(model: Path, tokens: Sequence[int]) -> list[float]:
    """Of tokens after the prompt, by one pass of the model as transformers loads it."""
    module = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = module(torch.tensor([[*_PROMPT, *tokens]]), use_cache=False).logits[0, len(_PROMPT) - 1 : -1]
    found: list[float] = torch.log_softmax(logits, -1)[torch.arange(len(tokens)), torch.tensor(tokens)].tolist()
    return found


def of_trainer(model: Path) -> str:
    """The cell of the trainer."""

    def computed() -> tuple[Sequence[int], list[float]]:
        given = {name: as_torch(block) for name, block in read_tensors(model).items()}
        policy = Policy(model, given, TrainerConfig(dtype="float32", device="cpu"))
        batch = collate([0], [list(_PROMPT)], [list(_COMPLETION)], [[0.0] * len(_COMPLETION)])
        return _COMPLETION, policy.logprobs(batch, 1.0)[0][0].tolist()

    return _cell(model, computed)


def of_engine(model: Path, build: Callable[[], Engine], plain: Plain = plain_logprobs) -> str:
    """The cell of an engine that `build` makes; `plain` computes what it is compared with."""

    def computed() -> tuple[Sequence[int], list[float]]:
        engine = build()
        engine.load_weights(0, read_tensors(model))
        engine.start([GenerationRequest(0, 0, _PROMPT, (), 11, SamplingParams(max_completion_length=24))])
        tokens: list[int] = []
        logprobs: list[float] = []
        while deltas := engine.step():
            tokens += [token for delta in deltas for token in delta.token_ids]
            logprobs += [logprob for delta in deltas for logprob in delta.logprobs]
        return tokens, logprobs

    return _cell(model, computed, plain)


def _cell(model: Path, compute: Callable[[], tuple[Sequence[int], list[float]]], plain: Plain = plain_logprobs) -> str:
    try:
        tokens, found = compute()
    except Exception as error:  # noqa: BLE001 - whatever it is refused with
        line = " ".join(str(error).replace(str(model), "<model>").split()).replace("|", "/")
        kept = line if len(line) <= 180 else f"{line[:180].rpartition(' ')[0]} ..."
        # Names of classes in angle brackets would be tags of HTML.
        return re.sub(r"<class '[\w.]*\.(\w+)'>", r"\1", kept).replace("<model>", "MODEL").replace("<", "&lt;")
    gap = max(abs(a - b) for a, b in zip(found, plain(model, tokens), strict=True))
    return RIGHT if gap <= TOLERANCE else f"differs by {gap:.1g} nats"


def shown() -> dict[str, tuple[str, ...]]:
    """The cells of the page by family: trainer, torch engine, vLLM."""
    rows = {row[0]: row[1:] for row in _ROW.findall(PAGE.read_text(encoding="utf-8"))}
    return {family.title: rows[family.title] for family in FAMILIES if family.title in rows}


def agree(column: str, found: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Where the page says something else than was found: (page, found) by family; {} after it has been written anew."""
    place = COLUMNS.index(column) - 1
    before = shown()
    if os.environ.get(WRITES):
        rows = {title: list(before.get(title, ("not tried",) * 3)) for title in (family.title for family in FAMILIES)}
        for title, cell in found.items():
            rows[title][place] = cell
        table = "\n".join(f"| {' | '.join((title, *cells))} |" for title, cells in rows.items())
        text = PAGE.read_text(encoding="utf-8")
        start, end = text.index("| family |"), text.index("\n\n", text.index("| family |"))
        head = "| family | trainer | torch engine | vLLM |\n|---|---|---|---|\n"
        PAGE.write_text(text[:start] + head + table + text[end:], encoding="utf-8")
        return {}
    cells = {title: before.get(title, ("",) * 3)[place] for title in found}
    return {title: (cells[title], cell) for title, cell in found.items() if cells[title] != cell}
