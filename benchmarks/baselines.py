"""The alternatives to token journals when a member dies, as processes that a benchmark can kill.

Both decode with the same engine and sampling noise as ours, so that they differ only in what they lose. They cost less
than the systems they stand for: a finished response takes one small file, other processes do not fail, and only the
dead worker's own work is lost.

`whole_batch_process`: a worker's batch is kept only when all of it has ended. This is what AReaL, SkyRL and slime
(in-flight and buffered responses are in memory), TRL (the generation batch), OpenRLHF and RLinf (everything since the
checkpoint) do on a cold restart, in which the whole job restarts.
`finished_kept_process`: finished responses are durable, others begin again from the prompt, and a worker with room
takes responses that no worker has. This is what verl does ("half-generated tokens are not durable, a re-issued prompt
restarts generation from scratch", tests/trainer/ppo/v1/test_reissue_inflight_on_cpu.py), and NeMo-RL with its buffer of
finished groups.
"""

import json
import os
import tempfile
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from benchmarks.crew_processes import StepLog, logged_engine
from storage.journal.noise_keys import noise_key
from storage.records import layout, model_files, prompt_table
from storage.records.run import read_plan, read_run
from storage.stores.connect import connect
from storage.weights.tensor_sets import pull
from tasks.configuration.iteration_config import config_in_force
from tasks.sampling.engines.engine import GenerationRequest

LOOK_INTERVAL_S = 0.05


class Work(Protocol):
    """The source of a baseline worker's responses, and their destination."""

    def take(self, room: int) -> list[int]:
        """Responses to begin now, at most `room`."""
        ...

    def lost(self, held: Iterable[int]) -> set[int]:
        """Those of the held responses that another worker has now."""
        ...

    def put(self, response: int, token_ids: Sequence[int]) -> None:
        """Store a response that has ended."""
        ...

    def complete(self) -> bool:
        """Whether no more responses can be taken."""
        ...


class WholeBatch:
    """A fixed batch that is written as one file when all of it has ended."""

    def __init__(self, path: Path, responses: Sequence[int]) -> None:
        self._path = path
        self._waiting = list(responses)
        self._ended: dict[int, list[int]] = {}
        self._size = len(responses)

    def take(self, room: int) -> list[int]:
        now, self._waiting = self._waiting[:room], self._waiting[room:]
        return now

    def lost(self, held: Iterable[int]) -> set[int]:  # noqa: ARG002 - no worker takes a part of a batch
        return set()

    def put(self, response: int, token_ids: Sequence[int]) -> None:
        self._ended[response] = list(token_ids)
        if len(self._ended) == self._size:
            _write_durably(self._path, self._ended)

    def complete(self) -> bool:
        return self._path.exists()


class SharedQueue:
    """Responses that workers take one by one, with a hard link per taken response and a file per finished one."""

    def __init__(self, folder: Path, responses: Sequence[int], name: str) -> None:
        self._folder = folder
        self._left = list(responses)
        self._me = folder / f"life-{name}"
        self._me.write_bytes(b"")
        self._inode = self._me.stat().st_ino
        self._next_look_s = 0.0

    def take(self, room: int) -> list[int]:
        now: list[int] = []
        for response in self._left:
            if len(now) == room:
                break
            with suppress(FileExistsError):
                os.link(self._me, self._folder / f"taken-{response}")
                now.append(response)
        return [response for response in now if not self._done(response).exists()]

    def lost(self, held: Iterable[int]) -> set[int]:
        if time.monotonic() < self._next_look_s:
            return set()
        self._next_look_s = time.monotonic() + LOOK_INTERVAL_S
        return {response for response in held if _inode(self._folder / f"taken-{response}") != self._inode}

    def put(self, response: int, token_ids: Sequence[int]) -> None:
        _write_durably(self._done(response), {response: list(token_ids)})

    def complete(self) -> bool:
        self._left = [response for response in self._left if not self._done(response).exists()]
        return not self._left

    def _done(self, response: int) -> Path:
        return self._folder / f"done-{response}"


def release(folder: Path, names: Iterable[str]) -> None:
    """Return the responses that these lives took and did not finish to the queue."""
    inodes = {_inode(folder / f"life-{name}") for name in names} - {None}
    for taken in folder.glob("taken-*"):
        if _inode(taken) in inodes and not (folder / taken.name.replace("taken", "done")).exists():
            taken.unlink(missing_ok=True)


def results(folder: Path) -> dict[int, list[int]]:
    """The token ids of every response whose file exists."""
    return {
        int(response): token_ids
        for path in [*folder.glob("done-*"), *folder.glob("batch-*")]
        for response, token_ids in json.loads(path.read_text()).items()
    }


def whole_batch_process(run_url: str, slot: int, folder: str, step_time_s: float, log_path: str) -> None:
    """The body of a worker that keeps nothing until its batch is complete."""
    responses = read_plan(connect(run_url), 0).responses_of(slot)
    _work_off(WholeBatch(Path(folder) / f"batch-{slot}", responses), run_url, step_time_s, log_path)


def finished_kept_process(
    run_url: str, slot: int, folder: str, shared: bool, step_time_s: float, log_path: str
) -> None:
    """The body of a worker that keeps finished responses; `shared`: it also takes free ones of other slots."""
    plan = read_plan(connect(run_url), 0)
    Path(folder).mkdir(exist_ok=True)
    release(Path(folder), [path.name.removeprefix("life-") for path in Path(folder).glob(f"life-{slot}-*")])
    slots = range(slot, slot + len(plan.slots) if shared else slot + 1)
    responses = [response for each in slots for response in plan.responses_of(each % len(plan.slots))]
    _work_off(SharedQueue(Path(folder), responses, f"{slot}-{os.getpid()}"), run_url, step_time_s, log_path)


def _work_off(work: Work, run_url: str, step_time_s: float, log_path: str) -> None:
    """Decode until the work is complete."""
    store = connect(run_url)
    plan = read_plan(store, 0)
    config = config_in_force(store, plan)
    prompts = prompt_table.read_prompts(store, plan)
    with tempfile.TemporaryDirectory() as folder:
        model_files.download(store, Path(folder))
        vocab_size = read_run(store).vocab_size
        engine = logged_engine(config.rollout, Path(folder), vocab_size, StepLog(Path(log_path)), step_time_s)
    engine.load_weights(0, pull(store, layout.weights(0))[1])
    held: dict[int, list[int]] = {}
    while held or not work.complete():
        started = work.take(engine.max_responses_in_flight - len(held))
        if started:
            groups = [response // plan.num_generations for response in started]
            engine.start(
                [
                    GenerationRequest(r, g, prompts[g].token_ids, (), noise_key(plan.run_seed, 0, r), plan.sampling)
                    for r, g in zip(started, groups, strict=True)
                ]
            )
            held |= {response: [] for response in started}
        lost = work.lost(held)
        engine.abort(sorted(lost))
        held = {response: tokens for response, tokens in held.items() if response not in lost}
        if not held:
            time.sleep(LOOK_INTERVAL_S)
            continue
        for delta in engine.step():
            held[delta.response] += delta.token_ids
            if delta.finish_reason is not None:
                work.put(delta.response, held.pop(delta.response))
    engine.close()


def _write_durably(path: Path, tokens: dict[int, list[int]]) -> None:
    unfinished = path.with_name(f"unfinished-{path.name}-{os.getpid()}")
    with unfinished.open("w") as file:
        json.dump(tokens, file)
        file.flush()
        os.fsync(file.fileno())
    unfinished.replace(path)


def _inode(path: Path) -> int | None:
    try:
        return path.stat().st_ino
    except FileNotFoundError:
        return None
