"""Which names of a model stand for one tensor: tied weights, known by the identity of their parameters."""

import torch


def tied_names(model: torch.nn.Module) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """(shapes, aliases) of a model's parameters, as `Decoder` wants them."""
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
