"""crew_map: Flyte's map task, whose elements are real processes when it runs on one machine.

flytekit runs local map elements one after another in the caller's process, without attempts. Here a local element is a
child process that runs the container's command, in parallel and with attempts, so a local kill is a real kill. What is
serialised for a cluster is Flyte's ordinary array node (docs/decisions/0003).
"""

import atexit
import functools
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from flyteidl.core import errors_pb2, literals_pb2
from flytekit.configuration import ImageConfig, SerializationSettings
from flytekit.core import utils
from flytekit.core.array_node_map_task import ArrayNodeMapTask
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.models.core.workflow import NodeMetadata
from flytekit.models.literals import LiteralMap

from resources.local_starter import StartedProcess, running_starter
from storage.clock import SystemClock
from storage.errors import GleanerError
from storage.waiting import STOPPED_LIMIT_S, STOPPED_LOOK_S, StoppedProcesses, Wait
from tasks.configuration.references import PlanReference
from tasks.task_log import logged_task, place_of

log = logging.getLogger(__name__)

SYSTEM_RETRIES = 3  # flytepropeller's default budget for lost machines, apart from a task's own retries
SYSTEM_EXITS = frozenset({-signal.SIGKILL, 137, 247})
STOP_TIME_LIMIT_S = 30.0
ENTRYPOINT = "flytekit.bin.entrypoint"
# In the text of an error that flytekit writes.
BEFORE_CAUSE = "\n\nMessage:\n\n"
ROOT = Path(__file__).resolve().parent.parent


class ElementFailed(GleanerError, RuntimeError):  # noqa: N818 - reads as what happened
    """An element of a local map used up its attempts, or failed without a retry; other elements continue."""


class CrewMapTask(ArrayNodeMapTask):  # type: ignore[misc]
    """An array node on a cluster; child processes with the container's command on one machine.

    local_retries: attempts on one machine after the task's own failures; on a cluster the node's override counts.
    imports: modules that a local element needs soon, apart from its task's own; they are imported once for all.
    title: the node's name in the console, because flytekit gives a map's name override to its elements only.
    stands: on one machine the elements run beside the nodes that follow, and end with this process at the latest.
    stopped_limit_s: the longest wait on one machine for an element stopped by a signal, before its end by a kill.
    end_limit_s: the time from SIGTERM to the kill of an element on one machine.
    """

    stands: bool
    local_retries: int
    imports: Sequence[str]
    title: str
    stopped_limit_s: float = STOPPED_LIMIT_S
    end_limit_s: float = STOP_TIME_LIMIT_S

    def build_on(self, pod_template: str) -> None:
        """Build the pods on the cluster's PodTemplate of this name, and add the name to the task's name."""
        # The metadata is shared with the task that is mapped.
        self._metadata = replace(self.metadata, pod_template_name=pod_template)
        self._name = f"{self.name}-{pod_template}"

    def construct_node_metadata(self) -> NodeMetadata:
        """The metadata of any map, with a name that people can read."""
        return NodeMetadata(name=self.title)

    def _raw_execute(self, **kwargs: Any) -> list[Any]:
        sizes = [len(v) for k, v in kwargs.items() if isinstance(v, list) and k not in self.bound_inputs]
        if not sizes[0]:
            return []
        if self.stands:
            elements = _StandingElements(self, kwargs, sizes[0])
            if "slot" in kwargs:
                _standing.append(elements)
            return [None] * sizes[0]
        from tasks.reporting.run_progress import crew_progress  # noqa: PLC0415 - on one machine alone

        plan = kwargs.get("plan")
        place, shown = "this machine", cast("AbstractContextManager[None]", nullcontext())
        if isinstance(plan, PlanReference):
            place, shown = place_of(plan), crew_progress(plan.run_url)
        name = self.python_function_task.task_function.__name__
        told = logged_task(place, None, f"{name}, {sizes[0]} processes")
        with tempfile.TemporaryDirectory(prefix="gleaner-map-") as folder, told, shown:
            local = _LocalElements(self, Path(folder), kwargs, sizes[0])
            return local.run()


def import_ahead(imports: Sequence[str]) -> None:
    """On one machine, import what a map's elements need while the nodes before the map run; elsewhere do nothing."""
    state = FlyteContextManager.current_context().execution_state
    if state is not None and state.is_local_execution():
        running_starter(_environment(1)).import_ahead((ENTRYPOINT, *imports))


def _environment(width: int) -> dict[str, str]:
    """Variables of elements, of which `width` run at once."""
    return {
        "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // width)),
        **os.environ,
        "BATCH_JOB_ARRAY_INDEX_VAR_NAME": "FLYTE_K8S_ARRAY_INDEX",
        "FLYTE_INTERNAL_EXECUTION_ID": "local",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
    }


# Why slots failed for good in maps of this process.
_failed: dict[tuple[PlanReference, int], str] = {}


def failed_slots(plan: PlanReference) -> dict[int, str]:
    """Why slots of a map over this plan failed for good on this machine, by slot, in a line each; returned once.

    The members themselves could not say it where the store refused them.
    """
    return {slot: _failed.pop((plan, slot)) for of, slot in list(_failed) if of == plan}


class _LocalElements:
    def __init__(self, task: CrewMapTask, folder: Path, inputs: dict[str, Any], size: int) -> None:
        self._task = task
        self._folder = folder
        self._inputs = inputs
        self._size = size
        self._width = min(size, task.concurrency or size)
        self._children: set[StartedProcess] = set()
        self._stopping = False
        self._lock = threading.Lock()
        self._environment = _environment(self._width)
        self._imports = (ENTRYPOINT, task.python_function_task.task_function.__module__, *task.imports)
        settings = SerializationSettings(
            image_config=ImageConfig.auto(img_name="local/none:0"),
            project="local",
            domain="local",
            version="local",
        )
        self._command = task.get_command(settings)
        context = FlyteContextManager.current_context()
        literals = {
            name: TypeEngine.to_literal(context, inputs[name], kind, TypeEngine.to_literal_type(kind))
            for name, kind in task.python_interface.inputs.items()
        }
        utils.write_proto_to_file(LiteralMap(literals).to_flyte_idl(), str(folder / "inputs.pb"))

    def run(self) -> list[Any]:
        """Run every element; returns the outputs in order, None for an element that failed for good."""
        with self._interrupted_by_notice(), ThreadPoolExecutor(self._width) as threads:
            futures = [threads.submit(self._element, index) for index in range(self._size)]
            try:
                return [self._outcome(future) for future in futures]
            except BaseException:
                threads.shutdown(wait=False, cancel_futures=True)
                self.stop()
                raise

    @contextmanager
    def _interrupted_by_notice(self) -> Iterator[None]:
        """Within it SIGTERM does what Ctrl-C does, once; without that it would leave the elements behind.

        Python allows handlers in the main thread only; in another one nothing changes.
        """
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def interrupt(*_: object) -> None:
            if not self._stopping:
                raise KeyboardInterrupt("SIGTERM")

        before = signal.signal(signal.SIGTERM, interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)

    def run_beside(self, ended: Callable[[], None]) -> None:
        """Run every element in daemon threads; `ended` is called when the last one has ended."""
        places, left = threading.Semaphore(self._width), list(range(self._size))

        def run(index: int) -> None:
            try:
                with places:
                    self._element(index)
            except Exception as error:  # noqa: BLE001 - one element must not end the others
                log.warning("%s", error)
            with self._lock:
                left.remove(index)
                is_last = not left
            if is_last:
                ended()

        # Its end is arranged before that of the elements, so that these are ended, and waited for, first.
        running_starter(self._environment)
        for index in range(self._size):
            threading.Thread(target=run, args=(index,), name=f"element {index}", daemon=True).start()

    def _outcome(self, future: "Future[Any]") -> Any:
        try:
            return future.result()
        except ElementFailed as error:
            log.warning("%s", error)
            return None

    def _element(self, index: int) -> Any:
        user_failures = system_failures = attempt = 0
        previous = ""
        while True:
            folder = self._folder / str(index) / str(attempt)
            code = self._attempt(index, attempt, folder, previous)
            output = folder / "out" / "outputs.pb"
            if output.exists():
                return self._read_output(output)
            message, recoverable = _read_error(folder / "out" / "error.pb")
            reason = message or f"exit code {code}"
            if self._stopping or not recoverable:
                self._note(index, reason)
                raise ElementFailed(f"element {index} of {self._task.name} failed: {reason}")
            if not message and code in SYSTEM_EXITS:
                system_failures += 1
            else:
                user_failures += 1
            if system_failures > SYSTEM_RETRIES or user_failures > self._task.local_retries:
                self._note(index, reason)
                raise ElementFailed(f"element {index} of {self._task.name}: no attempts left; last: {reason}")
            log.warning("element %d, attempt %d ended with exit code %d; starting it again", index, attempt, code)
            previous, attempt = str(folder / "raw" / "_flytecheckpoints"), attempt + 1

    def _note(self, index: int, reason: str) -> None:
        """Remember why a slot failed; a map of something else has none."""
        plan, slots = self._inputs.get("plan"), self._inputs.get("slot")
        if isinstance(plan, PlanReference) and slots and not self._stopping:
            _failed[plan, slots[index]] = reason

    def _attempt(self, index: int, attempt: int, folder: Path, previous: str) -> int:
        values = {
            "{{.input}}": str(self._folder / "inputs.pb"),
            "{{.outputPrefix}}": str(folder / "out"),
            "{{.rawOutputDataPrefix}}": str(folder / "raw"),
            "{{.checkpointOutputPrefix}}": str(folder / "raw" / "_flytecheckpoints"),
            "{{.prevCheckpointPrefix}}": previous or '""',
        }
        command = [values.get(part, part) for part in self._command]
        command[0] = str(Path(sys.executable).parent / command[0])
        environment = {
            **self._environment,
            "FLYTE_K8S_ARRAY_INDEX": str(index),
            "FLYTE_ATTEMPT_NUMBER": str(attempt),
        }
        with self._lock:
            if self._stopping:
                raise ElementFailed(f"element {index} of {self._task.name} was not started: the map is being ended")
            # In its own session, the child gets an interrupt at the terminal as our SIGTERM, on which it flushes. It
            # gets the same if this process is killed, because then the starter ends.
            child = running_starter(self._environment).start(command, environment, self._imports)
            self._children.add(child)
        try:
            return self._end_of(child, index)
        finally:
            with self._lock:
                self._children.discard(child)

    def _end_of(self, child: StartedProcess, index: int) -> int:
        """How the process ended; one that a signal has stopped for too long is killed."""
        then = "it is killed, and started again if attempts are left"
        waiting = StoppedProcesses(SystemClock(), then, self._task.stopped_limit_s)
        is_killed = False
        while True:
            with suppress(TimeoutError):
                return child.wait(STOPPED_LOOK_S)
            process = child.stopped
            why = waiting.given_up({} if process is None else {f"element {index} of {self._task.name}": process})
            if why is not None and not is_killed:
                is_killed = True
                log.warning("%s, and is killed", why)
                child.kill()

    def _read_output(self, path: Path) -> Any:
        literals = LiteralMap.from_flyte_idl(utils.load_proto_from_file(literals_pb2.LiteralMap, str(path)))
        name, kind = next(iter(self._task.python_function_task.python_interface.outputs.items()))
        return TypeEngine.to_python_value(FlyteContextManager.current_context(), literals.literals[name], kind)

    def stop(self) -> None:
        """End the running elements: SIGTERM lets members flush, and a kill follows after `end_limit_s`."""
        with self._lock:
            self._stopping = True
            children = list(self._children)
        for child in children:
            child.end()
        what = f"the processes of {self._task.name} to write what they have"
        waiting = Wait(what, SystemClock(), self._task.end_limit_s, "then they are killed")
        for child in children:
            while not waiting.is_over:
                waiting.speak()
                with suppress(TimeoutError):
                    child.wait(min(STOPPED_LOOK_S, waiting.left_s))
                    break
            else:
                child.kill()


class _StandingElements:
    """The elements of a standing map while the following nodes run."""

    def __init__(self, task: CrewMapTask, inputs: dict[str, Any], size: int) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="gleaner-map-")
        self._lock = threading.Lock()
        self._then: list[Callable[[], object]] = []
        self._has_ended = False
        self._elements = _LocalElements(task, Path(self._folder.name), inputs, size)
        self._elements.run_beside(self._ended)
        atexit.register(self._stop)

    def after(self, then: Callable[[], object]) -> None:
        """Call `then` when the last element has ended."""
        with self._lock:
            if not self._has_ended:
                self._then.append(then)
                return
        then()

    def _ended(self) -> None:
        with self._lock:
            self._has_ended = True
        for then in self._then:
            try:
                then()
            except Exception as error:  # noqa: BLE001 - no node waits for it
                log.warning("after a standing map: %s", error)

    def _stop(self) -> None:
        if not self._has_ended:
            self._elements.stop()
        self._folder.cleanup()


# Of crews: they have slots.
_standing: list[_StandingElements] = []


def after_standing_map(then: Callable[[], object]) -> None:
    """Call `then` when the process's last map of a standing crew has ended.

    Without such a map `then` is called at once; on a cluster a node behind a map begins after the map's end anyway.
    """
    if _standing:
        _standing[-1].after(then)
    else:
        then()


def _read_error(path: Path) -> tuple[str, bool]:
    """An element's error message on one line, empty after a kill, and whether a further attempt may help."""
    if not path.exists():
        return "", True
    error = utils.load_proto_from_file(errors_pb2.ErrorDocument, str(path)).error
    # The process itself has shown the traceback, which flytekit puts first; a log shows a message on one line.
    cause = error.message.rpartition(BEFORE_CAUSE)[2]
    return " ".join(cause.split()), error.kind == errors_pb2.ContainerError.RECOVERABLE


def crew_map(
    target: "functools.partial[Any]",
    concurrency: int = 0,
    local_retries: int | None = None,
    imports: Sequence[str] = (),
    title: str | None = None,
    *,
    stands: bool = False,
    pod_template: str | None = None,
) -> CrewMapTask:
    """Map a task over the list given for its unbound input, with at most `concurrency` elements at a time (0: all).

    The 0 reaches Flyte. A map that says nothing takes its share of the parallelism of the whole execution, where
    Flyte's `array-node-config.default-parallelism-behavior` is "hybrid", and the trainer is held back for it.
    The map succeeds however its elements end: it says how many machines may help, not how many must.
    """
    mapped = CrewMapTask(target, concurrency=concurrency, min_success_ratio=0.0)
    mapped.local_retries = mapped.metadata.retries if local_retries is None else local_retries
    mapped.imports = imports
    mapped.stands = stands
    mapped.title = mapped.name if title is None else title
    if pod_template:
        mapped.build_on(pod_template)
    return mapped
