"""Our tasks under Flyte 2: bodies of `tasks/` ask flytekit, and get answers of the SDK `flyte`.

A body speaks of Flyte in four places, all of which are answered here: the name of the execution, whether the process is
a pod's, errors after which another attempt may help, and Decks. Flyte 2 starts a task again after every error but
`NonRecoverableError`; flytekit, only after `FlyteRecoverableException`.
"""

import asyncio
import contextvars
import functools
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from typing import Any

import flyte
import flyte.errors
import flyte.report
from flytekit.core.context_manager import ExecutionState, FlyteContextManager, flyte_context_Var
from flytekit.exceptions.user import FlyteRecoverableException
from flytekit.models.core.identifier import WorkflowExecutionIdentifier

from resources.granted import EXECUTION_VARIABLE

LOCAL = "local"
Modes = ExecutionState.Mode


def carried(task: Any, module: str) -> Callable[..., Any]:
    """A task of ours as an async function for `flyte`, with the same inputs and outputs.

    In a pod the body runs in the main thread, where alone a process can wait for SIGTERM; on one machine, in a new
    thread beside other tasks. module: the module in which pods find the task of Flyte 2 by name.
    """
    function = task.task_function

    @functools.wraps(function)
    async def body(**inputs: Any) -> Any:
        if is_local():
            return await in_a_thread(called, function, inputs, LOCAL, Modes.LOCAL_TASK_EXECUTION)
        execution = flyte.ctx().action.run_name
        os.environ[EXECUTION_VARIABLE] = execution
        return contextvars.copy_context().run(called, function, inputs, execution, Modes.TASK_EXECUTION)

    body.__module__ = module
    return body


def is_local() -> bool:
    """Whether the task at work was started without a backend."""
    context = flyte.ctx()
    return context is None or context.mode == LOCAL


def called(function: Callable[..., Any], inputs: dict[str, Any], execution: str, mode: Any) -> Any:
    """Call a body; raises NonRecoverableError unless another attempt may help.

    Changes the thread's context variables. execution: the name that the body sees. mode: flytekit's, by which the body
    knows whether the process ends with it.
    """
    decks = _see(execution, mode)
    try:
        return function(**inputs)
    except FlyteRecoverableException:
        raise
    except Exception as error:
        # In a pod, the text of the error begins with a line for people (tasks/task_log.py).
        raise flyte.errors.NonRecoverableError(str(error), type(error).__name__) from error
    finally:
        for deck in decks:
            flyte.report.get_tab(deck.name).replace(deck.html)


def _see(execution: str, mode: Any) -> list[Any]:
    """Let the body see the execution; returns the list of Decks, which the body fills."""
    context = FlyteContextManager.current_context()
    seen = context.user_space_params.with_task_sandbox()
    seen.execution_id = WorkflowExecutionIdentifier(project=LOCAL, domain=LOCAL, name=execution)
    seen.decks = decks = list[Any]()
    state = context.execution_state.with_params(mode=mode, user_space_params=seen.build())
    # A list of its own: flytekit's stack of contexts is one object for all threads that copied the variable.
    flyte_context_Var.set([context.with_execution_state(state).build()])
    return decks


async def in_a_thread(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function that blocks, in a thread that does not keep the process from ending."""
    ended: Future[Any] = Future()
    context = contextvars.copy_context()

    def run() -> None:
        # Who waited may have been cancelled.
        with suppress(InvalidStateError):
            try:
                ended.set_result(context.run(function, *arguments))
            except BaseException as error:  # noqa: BLE001 - it is raised where the result is waited for
                ended.set_exception(error)

    threading.Thread(target=run, name=getattr(function, "__name__", "task"), daemon=True).start()
    return await asyncio.wrap_future(ended)
