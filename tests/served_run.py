"""A served run in this process: its windows and its book, with members in a thread."""

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

from storage.clock import SystemClock
from storage.records import layout
from storage.records.run import exists, holds_run, plans_in_flight
from storage.stores.connect import connect
from storage.stores.store import ObjectMissing
from tasks.configuration.run_config import RunConfig
from tasks.external.rollouts import Rollouts
from tasks.sampling.session.join import JoinLimits, join_run
from tasks.sampling.session.member import Build
from tasks.serving.request_book import RequestBook
from tasks.serving.served_model import ServedModel, opened_model
from tasks.serving.served_request import read_served
from tasks.serving.windows import Answer, Windows
from tests.dying_store import Killed
from tests.small_run import config, roll_out

LIMIT_S = 120.0
SECTIONS: dict[str, Any] = {
    "run": {"num_generations": 1},
    "data": {"source": "submitted"},
    "rewards": [],
    "algorithm": {"micro_batch_order": "arrival", "max_staleness": 2},
    "trainer": {"placement": "external", "group_timeout_s": 30.0},
    "optimizer": {"learning_rate": 1e-6},
}


def settings(url, model, **sections):
    return config(url, model, **(SECTIONS | sections))


@contextmanager
def crew(url: str) -> Iterator[None]:
    """Members that generate each planned iteration, until the end of the block."""
    ended, store = threading.Event(), connect(url)

    def generate() -> None:
        while not ended.wait(0.02):
            for plan in plans_in_flight(store) if holds_run(store) else ():
                if not exists(store, layout.closed(plan.iteration)):
                    with suppress(ObjectMissing):
                        roll_out(url, plan.iteration)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(60)


@contextmanager
def machines(url: str, number: int, build: Build) -> Iterator[None]:
    """Machines that joined the run, until the end of the block; it fails with a machine."""
    leave = threading.Event()
    with ThreadPoolExecutor(number) as pool:
        joined = [
            pool.submit(join_run, url, JoinLimits(), leave.is_set, SystemClock(), build=build) for _ in range(number)
        ]
        try:
            yield
        finally:
            leave.set()
        for each in joined:
            each.result(60)


@dataclass
class Life:
    """One life of a server, without its port."""

    config: RunConfig
    model: ServedModel
    windows: Windows
    book: RequestBook
    died: threading.Event

    def ask(self, key: str, **body: Any) -> Answer | None:
        """The answer to a request under a key; None if the server dies first. Fails after LIMIT_S."""
        until_s = time.monotonic() + LIMIT_S
        asked = read_served(json.dumps({"model": "policy", **body}).encode(), "text", self.config.sampling)
        while not self.died.wait(0.01):
            found = self.book.begin(key, asked, has_key=True)
            while found is not None and not self.died.wait(0.01):
                assert time.monotonic() < until_s, f"{key} has no answer after {LIMIT_S:.0f} s"
                if found.done():
                    return found.result()
        return None


@contextmanager
def life(given: RunConfig) -> Iterator[Life]:
    """A server's life; it ends with the block, or when its thread is killed."""
    died = threading.Event()
    with opened_model(given) as model, Rollouts(given) as rollouts:
        windows = Windows(rollouts, SystemClock(), 0.01)

        def work() -> None:
            with suppress(Killed):
                windows.serve()
            died.set()

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield Life(given, model, windows, RequestBook(connect(rollouts.url), windows, model), died)
        windows.close()
        thread.join(30)


def seen(answer: Answer) -> list[tuple[Any, ...]]:
    """An answer as comparable values."""
    return [
        (answer.created_s, group.prompt_token_ids, each.token_ids.tolist(), each.logprobs.tolist(), each.finish_reason)
        for group in answer.groups
        for each in group.responses
    ]
