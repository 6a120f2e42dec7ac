"""Stored names: the conversion between a checkpoint's tensors and a module's, by transformers' own mapping.

Engines and trainer load weight versions through StoredNames, and the trainer publishes through StoredNames, so every
version has the names of the pretrained model. This module compares names, shapes and dtypes, without knowledge of files
or devices.
"""

import copy
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from storage.errors import WrongInputError

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
# What old releases of transformers stored, and every release computes itself.
_RECOMPUTED = (r"(^|\.)masked_bias$", r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")
_NAMES_SHOWN = 5


class StoredNamesError(WrongInputError):
    """The stored tensors are not this module's; one line that names a tensor."""


def own_names(module: nn.Module) -> dict[str, str]:
    """Each name in a module's state -> the tensor's canonical name: the first name of a tied parameter."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(p), name) for name, p in module.named_parameters(remove_duplicate=False)}
    return {name: names.get(name, name) for name in module.state_dict()}


@dataclass
class _Group:
    """Stored tensors that together make one tensor of the module, or several tensors by a conversion.

    Attributes:
        target: The module's name that transformers derives from each stored name.
        conversion: transformers' conversion; None for a stored tensor that needs no conversion.
        patterns: Stored name -> the conversion's source pattern that the name matches, or "".
        before: Stored name as the conversion sees it -> stored name.
        made: The module's tensors by name, on the device meta, as the conversion makes them.
    """

    target: str
    conversion: Any = None
    patterns: dict[str, str] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    made: dict[str, Tensor] = field(default_factory=dict)

    @property
    def sources(self) -> list[str]:
        return list(self.patterns)


class StoredNames:
    """The correspondence between the names of stored tensors and a module's names, in both directions.

    Args:
        module: A model of transformers; its tensors may be on the device meta.
        stored: Name -> tensor, which may be on meta, too: only shapes and dtypes are read.

    Raises:
        StoredNamesError: A tensor is missing, is unknown, or has a wrong shape or no plain float dtype; or
            transformers' conversion cannot be undone.
    """

    def __init__(self, module: Any, stored: Mapping[str, Tensor]) -> None:
        self._module = module
        self._headers = {name: torch.empty_like(tensor, device="meta") for name, tensor in stored.items()}
        self._own = own_names(module)
        self._state: dict[str, Tensor] = module.state_dict()
        groups, unexpected = self._grouped()
        passed_over = re.compile("|".join(_passed_over(module)))
        self.passed_over = tuple(name for name in unexpected if passed_over.search(name))
        self._check_dtypes(groups)
        self._given = {group.target for group in groups}
        # Pairs of stored tensors that are one tensor of the module.
        self.ties: tuple[tuple[str, str], ...] = ()
        self._groups = self._without_ties(groups)
        self._of_target: dict[str, _Group] = {}
        for group in self._groups:
            self._claim(group)
        self._check_names([name for name in unexpected if name not in self.passed_over])
        for group in self._groups:
            self._check(group)

    @property
    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the module's tensors as the checkpoint gives them."""
        return {name: value.dtype for group in self._groups for name, value in group.made.items()}

    def stored_name(self, own: str) -> str | None:
        """The stored name of a module's tensor; None for a tensor that a conversion makes, or that is not stored."""
        group = self._of_target.get(self._own[own])
        return None if group is None or group.conversion else group.sources[0]

    @property
    def other_names(self) -> dict[str, str]:
        """Each name of a tied tensor in the module without a stored tensor -> the stored name of the tied tensor."""
        found = {name: self.stored_name(name) for name in self._own if name not in self._given}
        return {name: stored for name, stored in found.items() if stored is not None}

    def check_ties(self, stored: Mapping[str, Any], whole: Callable[[Any], Tensor] = lambda tensor: tensor) -> None:
        """Raise StoredNamesError if two stored tensors of one tied tensor differ in values.

        transformers would then leave the tensors untied, against the configuration. whole: as in `to_module`.
        """
        for alias, name in self.ties:
            if not torch.equal(whole(stored[alias]), whole(stored[name])):
                raise different_ties(alias, name)

    def to_module(
        self, stored: Mapping[str, Any], whole: Callable[[Any], Tensor] = lambda tensor: tensor
    ) -> Iterator[tuple[str, Any]]:
        """Yield the module's tensors by name, conversion by conversion: a tied tensor once, under its first name.

        A tensor without conversion is the stored object itself. `whole` turns a stored tensor into a torch tensor
        before its conversion. A buffer that is dispensable and not stored is left out.
        """
        for group in self._groups:
            if group.conversion is None:
                yield next(iter(group.made)), stored[group.sources[0]]
            else:
                yield from self._convert(group, [whole(stored[name]) for name in group.sources]).items()

    def to_stored(self, own: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield stored tensors, with stored names, shapes and dtypes, from the module's tensors: inverts `to_module`.

        A conversion yields its results as soon as `own` has given all inputs. Tied stored tensors are yielded once,
        under a single name.
        """
        waiting: dict[str, Tensor] = {}
        for name, tensor in own:
            group = self._of_target.get(name)
            if group is None:
                continue
            waiting[name] = tensor
            if not all(target in waiting for target in group.made):
                continue
            values = {target: waiting.pop(target) for target in group.made}
            back = self._revert(group, values) if group.conversion else dict.fromkeys(group.sources, tensor)
            for source, value in back.items():
                yield source, value.to(self._headers[source].dtype)

    def _grouped(self) -> tuple[list[_Group], list[str]]:
        """The groups of stored names by the module's tensor, and the stored names without a tensor in the module."""
        from transformers.conversion_mapping import get_model_conversion_mapping  # noqa: PLC0415 - takes seconds
        from transformers.core_model_loading import (  # noqa: PLC0415
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._module)
        renamings = [each for each in mapping if isinstance(each, WeightRenaming)]
        converters = [each for each in mapping if isinstance(each, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        prefix = self._module.base_model_prefix
        groups: dict[str, _Group] = {}
        unexpected: list[str] = []
        for name in sorted(self._headers, key=dot_natural_key):
            target, pattern = rename_source_key(name, renamings, converters, prefix, self._state)
            before, _ = rename_source_key(name, renamings, [])
            if target not in self._state and name in self._state:
                # As transformers does: a name that is the module's already is not renamed.
                target, pattern, before = name, None, name
            if target not in self._state:
                unexpected.append(name)
                continue
            conversion = None if pattern is None else by_pattern[pattern]
            group = groups.setdefault(target, _Group(target, conversion))
            if group.patterns and (conversion is None or group.conversion is not conversion):
                raise StoredNamesError(f"{name!r} and {group.sources[0]!r} are both stored for {target!r}")
            group.patterns[name], group.before[before] = pattern or "", name
        return list(groups.values()), unexpected

    def _without_ties(self, groups: list[_Group]) -> list[_Group]:
        """Fill in `made` of each group, note ties, and return a group for each tensor: the group of the first name."""
        chosen: dict[str, _Group] = {}
        for group in sorted(groups, key=lambda group: self._own[group.target] != group.target):
            headers = [self._headers[name] for name in group.sources]
            group.made = self._convert(group, headers) if group.conversion else {self._own[group.target]: headers[0]}
            known = chosen.setdefault(next(iter(group.made)), group)
            if known is not group:
                self.ties += ((group.sources[0], known.sources[0]),)
        return [group for group in groups if chosen[next(iter(group.made))] is group]

    def _claim(self, group: _Group) -> None:
        """Note the group's targets; StoredNamesError if the module lacks a target, or two groups make the target."""
        for target in group.made:
            if target not in self._state:
                raise StoredNamesError(f"{group.sources[0]!r} is converted to {target!r}, which the model lacks")
            other = self._of_target.setdefault(target, group)
            if other is not group:
                raise StoredNamesError(f"{group.sources[0]!r} and {other.sources[0]!r} are both stored for {target!r}")

    def _check_dtypes(self, groups: list[_Group]) -> None:
        for group in groups:
            wanted = self._state[group.target].dtype
            allowed = _FLOATS if wanted.is_floating_point else (wanted,)
            for name in group.sources:
                if self._headers[name].dtype not in allowed:
                    raise StoredNamesError(
                        f"{name!r} has the dtype {_plain(self._headers[name].dtype)}; "
                        f"allowed: {', '.join(map(_plain, allowed))} (not quantised)"
                    )

    def _check_names(self, unknown: list[str]) -> None:
        """Raise StoredNamesError for stored names that the module lacks, and for module tensors without a group."""
        buffers = dict(self._module.named_buffers())
        patterns = getattr(self._module, "_keys_to_ignore_on_load_missing", None) or ()
        dispensable = {name for name in buffers if any(re.search(pattern, name) for pattern in patterns)}
        wanted = set(self._own.values()) - dispensable
        missing = sorted(wanted - set(self._of_target))
        if not unknown and not missing:
            return
        head = getattr(self._module.get_output_embeddings(), "weight", None)
        is_head = any(self._module.get_parameter_or_buffer(name) is head for name in missing)
        hint = " (the head, which config.json does not tie to the embeddings)" if is_head else ""
        raise StoredNamesError(
            f"missing {_shown(missing)}{hint}; unknown {_shown(sorted(unknown))}; allowed: the model's own names"
        )

    def _check(self, group: _Group) -> None:
        """Raise StoredNamesError if a group's shape is wrong, or its conversion cannot be undone."""
        for target, value in group.made.items():
            shape = tuple(self._state[target].shape)
            if tuple(value.shape) != shape:
                count = len(group.sources)
                whose = repr(group.sources[0]) if count == 1 else f"{target!r}, of {count} tensors,"
                raise StoredNamesError(f"{whose} has shape {tuple(value.shape)}; allowed: {shape} (config.json)")
        if group.conversion is None:
            return
        back = self._revert(group, group.made)
        wrong = [name for name in group.sources if name not in back or back[name].shape != self._headers[name].shape]
        if wrong or len(back) != len(group.sources):
            raise StoredNamesError(f"{(wrong or group.sources)[0]!r}: transformers cannot undo its conversion")

    def _convert(self, group: _Group, values: list[Tensor]) -> dict[str, Tensor]:
        conversion = copy.deepcopy(group.conversion)
        for (name, pattern), value in zip(group.patterns.items(), values, strict=True):
            conversion.add_tensor(group.target, name, pattern, value)
        return self._run(conversion, group, group.target)

    def _revert(self, group: _Group, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        reverse = group.conversion.reverse_transform()
        for name, value in values.items():
            reverse.add_tensor(group.target, name, reverse.rename_source_key(name)[1], value)
        made = self._run(reverse, group, next(iter(group.before)))
        return {group.before[name]: value for name, value in made.items() if name in group.before}

    def _run(self, conversion: Any, group: _Group, name: str) -> dict[str, Tensor]:
        try:
            made = conversion.convert(name, model=self._module, config=self._module.config)
        except (RuntimeError, ValueError, KeyError, IndexError) as error:
            reason = " ".join(str(error).split())
            raise StoredNamesError(f"{group.sources[0]!r} cannot be converted: {reason}") from None
        return {name: value[0] if isinstance(value, list) else value for name, value in made.items()}


def has_experts(module: nn.Module) -> bool:
    """Whether a model of transformers is a mixture of experts, as its tensors' names tell."""
    return any(".experts." in name for name, _ in module.named_parameters())


def different_ties(alias: str, name: str) -> StoredNamesError:
    """The error for two stored tensors whose values differ although the module ties them."""
    return StoredNamesError(
        f"{alias!r} differs from {name!r}, to which the model ties it; allowed: equal values, or config.json with "
        "tie_word_embeddings: false"
    )


def _passed_over(module: Any) -> list[str]:
    """Patterns of stored names that the module ignores, because the module computes the tensor or lacks the part.

    The patterns are transformers' own, the names of buffers that are not in the module's state, and names from old
    releases of transformers.
    """
    stored = module.state_dict()
    computed = [rf"^{re.escape(name)}$" for name, _ in module.named_buffers() if name not in stored]
    if any(name.endswith("position_ids") for name, _ in module.named_buffers()):
        computed.append(r"(^|\.)position_ids$")
    return [*(getattr(module, "_keys_to_ignore_on_load_unexpected", None) or ()), *computed, *_RECOMPUTED]


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shown(names: list[str]) -> str:
    more = f" and {len(names) - _NAMES_SHOWN} more" if len(names) > _NAMES_SHOWN else ""
    return (", ".join(names[:_NAMES_SHOWN]) or "none") + more
