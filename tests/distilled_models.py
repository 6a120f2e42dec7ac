"""A tiny policy that was taught sums, and a smaller model distilled from it."""

import random
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - its customary name

from tests.tiny_model import CHARACTERS, tiny_model

_LENGTH, _ROWS, _STEPS = 32, 24, 150
_FIRST = 4  # the id of the first character


def _text(rnd: random.Random) -> list[int]:
    """Sums with words between them, which no model can foresee, as ids of characters."""
    text = ""
    while len(text) < _LENGTH:
        one, other = rnd.randrange(30), rnd.randrange(30)
        text += f"{one}+{other}={one + other}{rnd.choice((', ', '; ', '. '))}"
    return [_FIRST + CHARACTERS.index(character) for character in text[:_LENGTH]]


def prompts_of(count: int) -> list[tuple[int, ...]]:
    """The beginnings of texts that no model was taught."""
    rnd = random.Random(99)
    return [tuple(_text(rnd)[: rnd.randint(3, 9)]) for _ in range(count)]


def taught(config: Any) -> Any:
    """A policy that continues such texts."""
    return _trained(tiny_model(config), lambda logits, tokens: F.cross_entropy(logits.flatten(0, 1), tokens.flatten()))


def distilled(policy: Any, config: Any) -> Any:
    """A model of another size with nearly the policy's distributions."""

    def loss(logits: torch.Tensor, _tokens: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            theirs = policy(inputs).logits.log_softmax(-1)
        return F.kl_div(logits.log_softmax(-1), theirs, log_target=True, reduction="batchmean") / _LENGTH

    return _trained(tiny_model(config, seed=1), loss, teacher=True)


def _trained(model: Any, loss: Any, *, teacher: bool = False) -> Any:
    rnd = random.Random(0)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with torch.enable_grad():
        for _ in range(_STEPS):
            tokens = torch.tensor([_text(rnd) for _ in range(_ROWS)])
            inputs, targets = tokens[:, :-1], tokens[:, 1:]
            logits = model(inputs).logits
            found = loss(logits, targets, inputs) if teacher else loss(logits, targets)
            optimizer.zero_grad()
            found.backward()
            optimizer.step()
    return model.eval()
