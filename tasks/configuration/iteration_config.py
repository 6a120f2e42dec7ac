"""The configuration in force for an iteration: run.json's, with the settings of the execution that works on it.

Code and learning (rewards, tools, estimators, models) are run.json's, which is created once and is closed to machines
that join a run. Settings say how: intervals, limits, devices, places and prices.
"""

import functools
from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

from storage.errors import WrongInputError
from storage.records import layout
from storage.records.records import PlanRecord
from storage.records.run import read_plan, read_run, read_settings
from storage.stores.store import ConflictingRecord, CorruptObject, ObjectMissing, ObjectStore
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.deleted_fields import without_deleted
from tasks.configuration.operational import OPERATIONAL
from tasks.configuration.rewards import OPERATIONAL as OPERATIONAL_OF_REWARD
from tasks.configuration.run_config import RunConfig, changes, differences, dump, parse_held
from tasks.configuration.trainer import EXTERNAL

_LIMITS_OF_REWARD = {*OPERATIONAL_OF_REWARD} - {"model", "revision"}
# The fields of each section; None: all of it. Of what may change in a run, these name neither code nor a model. Those
# of `evaluation` are for an evaluation's own directory, where the rest of the section decides the outcome.
SETTINGS: Mapping[str, set[str] | None] = {
    **{section: names for section, names in OPERATIONAL.items() if section not in ("evaluation", "rewards")},
    "rewards": _LIMITS_OF_REWARD,
    "evaluation.rewards": _LIMITS_OF_REWARD,
}


class TrainedOutside(WrongInputError):  # noqa: N818 - reads as what happened
    """An external trainer has trained an iteration, and the run's own trainer is to go on from there."""


def settings_of(config: RunConfig, *, of_evaluation: bool = False) -> dict[str, Any]:
    """The part of the configuration that an execution may set anew, as JSON values.

    of_evaluation: the execution evaluates, so the limits of the evaluation's own rewards are settings, too.
    """
    resolved = dump(config)
    return _selected(resolved if of_evaluation else {**resolved, "evaluation": None})


def resolved_in_force(store: ObjectStore, plan: PlanRecord) -> dict[str, Any]:
    """The configuration in force for the plan's iteration as JSON values, as the run's version wrote them.

    Raises ObjectMissing without run.json, and CorruptObject if the settings hold what is not theirs to say.
    """
    run, settings = read_run(store), read_settings(store, plan.iteration)
    held = without_deleted(run.config, to_read=True)
    if settings is None:
        # The run is from before settings had their own place, or this is the moment between plan and settings.
        planned = plan.config if plan.weights_url else {**plan.config, "evaluation": None}
        resolved, strange = _overlaid(held, _selected(planned))
    else:
        given = without_deleted(settings.config, to_read=True)
        resolved, strange = _overlaid(held, given)
    if strange is not None:
        place = layout.plan if settings is None else layout.settings
        raise CorruptObject(place(plan.iteration), f"config: {strange}")
    return resolved


def config_in_force(store: ObjectStore, plan: PlanRecord) -> RunConfig:
    """The configuration in force for the plan's iteration.

    Raises what `resolved_in_force` raises, ConfigError, and ConflictingRecord if the plan is one of another
    configuration than the run's.
    """
    resolved = resolved_in_force(store, plan)
    config = parse_held(resolved, f"the configuration of iteration {plan.iteration}")
    unlike = changes(parse_held(plan.config), config)
    if unlike:
        reasons = "\n".join(f"  {line}" for line in unlike)
        raise ConflictingRecord(
            f"{layout.plan(plan.iteration)} has another configuration (here) than {layout.RUN} (there):\n{reasons}"
        )
    return config


def check_trained_here(store: ObjectStore, iteration: int) -> None:
    """Raise TrainedOutside if another program has trained an iteration, so that no replay leads to its weights.

    The published weights say who has trained. Without them plan and settings say who was to train.
    """
    try:
        is_outside = read_manifest(store, layout.weights(iteration + 1)).metadata.get("source") == EXTERNAL
    except ObjectMissing:
        plan, settings = read_plan(store, iteration), read_settings(store, iteration)
        given = [plan.config, {} if settings is None else settings.config]
        is_outside = any(_at(each, ("trainer", "placement")) == EXTERNAL for each in given)
    if is_outside:
        raise TrainedOutside(
            f"trainer.placement: another program has trained iteration {iteration}, whose state the run lacks; "
            f"allowed: {EXTERNAL!r}, or a new run from a published version"
        )


def _selected(resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Of a configuration, or of a part of one, the fields that are settings."""
    found: dict[str, Any] = {}
    for path, names in SETTINGS.items():
        section = _at(resolved, path.split("."))
        if section is not None:
            *parents, last = path.split(".")
            inside = functools.reduce(lambda node, name: node.setdefault(name, {}), parents, found)
            inside[last] = section if names is None else _only(section, names)
    return found


def _overlaid(held: Mapping[str, Any], given: Mapping[str, Any]) -> tuple[dict[str, Any], str | None]:
    """The run's configuration with these settings, and the first fault of the settings."""
    merged, settings = deepcopy(dict(held)), _selected(given)
    strange = differences(given, settings)
    if strange:
        return merged, f"{strange[0].partition(': ')[0]} given; allowed: intervals, limits, devices"
    for path, names in SETTINGS.items():
        section = _at(settings, path.split("."))
        if section is None:
            continue
        *parents, last = path.split(".")
        inside = _at(merged, parents)
        if inside is None:
            continue
        if names is None or inside.get(last) is None:
            inside[last] = section
        elif isinstance(section, list):
            count = len(inside[last])
            if len(section) != count:
                return merged, f"{path}: {len(section)} items; allowed: {count}, as in {layout.RUN}"
            inside[last] = [{**own, **each} for own, each in zip(inside[last], section, strict=True)]
        else:
            inside[last] = {**inside[last], **section}
    return merged, None


def _at(resolved: Mapping[str, Any], path: Iterable[str]) -> Any:
    """What stands at this path; None if a section of it is missing or none."""
    found: Any = resolved
    for name in path:
        found = found.get(name) if isinstance(found, Mapping) else None
    return found


def _only(section: Any, names: set[str]) -> Any:
    """These fields of a section, or of each item of a list of sections."""
    if isinstance(section, list):
        return [_only(item, names) for item in section]
    return {name: section[name] for name in names if name in section}
