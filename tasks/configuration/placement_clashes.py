"""Clashes of a run's place of training with other sections, and the urls of fleets."""

from collections.abc import Iterator, Sequence

from resources.pools import PoolConfig
from storage.stores.connect import LOCAL, check_url, is_below, overlap, place
from tasks.configuration.algorithm import AlgorithmConfig
from tasks.configuration.planning import PlanningConfig
from tasks.configuration.rewards import RewardConfig
from tasks.configuration.trainer import TrainerConfig

# Why the trainer's machines do not generate.
_WHY = {"standing": "keep the trainer's state", "external": "are not of this run"}


def needs_all_groups(algorithm: AlgorithmConfig) -> bool:
    """Whether a train phase that begins before the last group is recorded would wait, or let members generate on."""
    return algorithm.filter_groups or not algorithm.streams


def placements_that_clash(
    trainer: TrainerConfig,
    run_url: str,
    machines: PoolConfig,
    planning: PlanningConfig,
    rewards: Sequence[RewardConfig],
) -> Iterator[str]:
    """A line about each field that cannot be, with what is allowed; machines: `pools.train`."""
    placement = f"trainer.placement {trainer.placement!r}"
    if (trainer.fleet is None) == (trainer.placement == "shared"):
        allowed = "the url of a fleet" if trainer.fleet is None else "null"
        yield f"trainer.fleet: value {trainer.fleet!r}; allowed with {placement}: {allowed}"
    elif trainer.fleet is not None and (problem := _fleet_problem(trainer.fleet, run_url)) is not None:
        yield f"trainer.fleet: {problem}"
    if trainer.placement != "own":
        yield from _trained_apart(trainer, run_url, planning, rewards)
    if trainer.trained_by_host:
        yield from _hosts_that_clash(trainer, machines)


def _trained_apart(
    trainer: TrainerConfig, run_url: str, planning: PlanningConfig, rewards: Sequence[RewardConfig]
) -> Iterator[str]:
    """What cannot be where other machines than the trainer's record groups."""
    placement = f"trainer.placement {trainer.placement!r}"
    if trainer.placement == "standing" and not is_below(run_url, run_url):
        yield f"run.url: value {run_url!r}; allowed with {placement}: no part '.' or '..', nor one that stands for it"
    if planning.seeding == "auto":
        why = _WHY.get(trainer.placement, "are there for the train phase only")
        yield (f"planning.seeding: value 'auto'; allowed with {placement}: off, because the trainer's machines {why}")
    for index, reward in enumerate(rewards):
        if reward.model is not None:
            yield (
                f"rewards.{index}.model: given; allowed with {placement}: no reward model, because responses are "
                "graded on pools.control, which has no GPU"
            )


def _hosts_that_clash(trainer: TrainerConfig, machines: PoolConfig) -> Iterator[str]:
    """What a host cannot train; `pools.train` is what it is."""
    gpus = machines.gpus
    placement = f"trainer.placement {trainer.placement!r}"
    if trainer.nnodes > 1:
        yield (
            f"trainer.nnodes: value {trainer.nnodes}; allowed with {placement}: 1, because a host is one machine that "
            "trains a run alone"
        )
    if trainer.nproc_per_node < gpus:
        yield (
            f"trainer.nproc_per_node: value {trainer.nproc_per_node}; allowed with {placement}: pools.train.gpus "
            f"({gpus}), because a run has all devices of its host at a time"
        )


def _fleet_problem(url: str, run_url: str) -> str | None:
    """What is wrong with the url of a run's fleet; None if nothing can be seen of it."""
    try:
        check_url(url)
    except ValueError as error:
        return str(error).removeprefix("storage URL: ")
    if overlap(url, run_url):
        return f"value {url!r}; allowed: a directory of its own, neither above nor below run.url ({run_url})"
    here, there = place(url)[0], place(run_url)[0]
    if LOCAL in (here, there) and here != there:
        return (
            f"value {url!r}; allowed: a place that all reach who reach run.url ({run_url}): both paths, or both buckets"
        )
    return None
