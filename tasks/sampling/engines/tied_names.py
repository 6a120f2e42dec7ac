"""Tied weights: the names of a model's parameters that stand for one tensor, found by the parameters' identity."""

import torch


def tied_names(model: torch.nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The `shapes` and `aliases` of a model's parameters, as `Parameters` defines them."""
    first: dict[int, str] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    aliases: dict[str, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        original = first.setdefault(id(parameter), name)
        if original == name:
            shapes[name] = tuple(parameter.shape)
        else:
            aliases[name] = original
    return shapes, aliases
