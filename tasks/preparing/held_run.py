"""What stores hold against a configuration: a run with different learned settings, a fleet without the run."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from storage.records.run import AnotherRun, next_iteration, read_report, read_run
from storage.stores.connect import LOCAL, connect, place
from storage.stores.store import ObjectMissing, ObjectStore, StoreDenied, StoreUnavailable, StoreUnfit
from tasks.configuration.run_config import RunConfig, changes, parse_held
from tasks.planning.explain import advice_to_stand
from tasks.sharing.membership import check_admitted


def check_same_run(config: RunConfig, stored: Mapping[str, Any], url: str) -> None:
    """Raise AnotherRun, with a line for each learned setting in which a run's stored configuration differs."""
    unlike = changes(config, parse_held(stored))
    if unlike:
        raise AnotherRun(url, unlike)


def check_held_run(config: RunConfig) -> list[str]:
    """Compare the configuration with the run at run.url, if any, as a plan does; returns doubts and advice.

    Raises AnotherRun, CorruptObject, and StoreDenied for a path that cannot be read.
    """
    measured: list[str] = []

    def compare() -> None:
        store = connect(config.run.url)
        try:
            stored = read_run(store)
        except ObjectMissing:
            return
        check_same_run(config, stored.config, store.url)
        measured.extend(_slow_states(config, store))

    return [*_if_in_reach("run.url", config.run.url, compare), *measured]


def _slow_states(config: RunConfig, store: ObjectStore) -> Iterator[str]:
    """Advice to choose a standing trainer, if restoring and storing the state took long in the last iteration."""
    last = next_iteration(store) - 1
    if last < 0 or config.trainer.nnodes > 1 or any(reward.model is not None for reward in config.rewards):
        return
    metrics = read_report(store, last).metrics
    state_s = sum(metrics.get(f"timing_s/{what}", 0.0) for what in ("restore", "replay", "checkpoint"))
    advice = advice_to_stand(config.trainer.placement, state_s, metrics["timing_s/iteration"])
    if advice:
        yield f"trainer.placement: value {config.trainer.placement!r}; in iteration {last} {advice}"


def check_fleet(config: RunConfig) -> list[str]:
    """Look whether the fleet of the configuration has admitted the run; returns doubts, raises as `check_admitted`."""
    fleet = config.trainer.fleet_of(config.run.url)
    return [] if fleet is None else _if_in_reach("trainer.fleet", fleet, lambda: check_admitted(config))


def _if_in_reach(field: str, url: str, look: Callable[[], None]) -> list[str]:
    """A doubt if `look` finds a bucket that cannot be read from here, because the run's machines may reach it."""
    try:
        look()
    except (StoreUnavailable, StoreDenied, StoreUnfit) as error:
        if place(url)[0] == LOCAL:
            raise type(error)(f"{field}: {error}") from error
        return [f"{field}: what {url} holds cannot be seen from here: {error}"]
    return []
