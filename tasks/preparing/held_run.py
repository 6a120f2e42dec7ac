"""What stores already hold against a configuration: a run with other learned settings, a fleet without the run."""

from collections.abc import Callable, Mapping
from typing import Any

from storage.connect import LOCAL, connect, place
from storage.run import AnotherRun, read_run
from storage.store import ObjectMissing, StoreDenied, StoreUnavailable, StoreUnfit
from tasks.configuration.run_config import RunConfig, changes, parse
from tasks.sharing.membership import check_admitted


def check_same_run(config: RunConfig, stored: Mapping[str, Any], url: str) -> None:
    """Raise AnotherRun, with a line for each learned setting in which a run's stored configuration differs."""
    unlike = changes(config, parse(stored, held=True))
    if unlike:
        raise AnotherRun(url, unlike)


def check_held_run(config: RunConfig) -> list[str]:
    """Compare with the run at run.url, if it holds one, as a plan does; returns doubts.

    Raises AnotherRun, CorruptObject, and StoreDenied for a path that cannot be read.
    """

    def compare() -> None:
        store = connect(config.run.url)
        try:
            stored = read_run(store)
        except ObjectMissing:
            return
        check_same_run(config, stored.config, store.url)

    return _if_in_reach("run.url", config.run.url, compare)


def check_fleet(config: RunConfig) -> list[str]:
    """Look whether trainer.fleet, if it is given, has admitted the run; returns doubts, raises as `check_admitted`."""
    fleet = config.trainer.fleet
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
