"""The child process in which tools and environments run: `python -m tasks.turns.environment_worker`.

The process answers one "load" message, then any number of requests side by side, each in a thread of its own;
coroutines run on one event loop. A message tells the parent when a request begins; the message and the reply carry the
request's number. The parent (`tool_processes`) limits the number of requests at once, and enforces time limits. Errors
of a user's code, SystemExit too, are replies.
"""

import asyncio
import contextlib
import contextvars
import inspect
import json
import math
import os
import queue
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any, NoReturn

from resources.user_process import Inbox, Replies, describe, serve_parent
from tasks.configuration.user_function import NotAFunction, load_function
from tasks.turns.current_call import CALL, CurrentCall
from tasks.turns.seeded_random import draw_from, follow_seeds
from tasks.turns.tool_schemas import NOT_TOOLS, ToolsUnusable, describe_tools

STATE_OBJECT_BYTES_MAX = 64 << 20
LOOPBACK = "127.0.0.1"
_MAIN_THREAD_ONLY = "signal only works in main thread"


class _Refused(Exception):  # noqa: N818 - reads as what happened
    """A user's code broke a rule; the message names the rule."""


def main() -> None:
    """Serve requests until standard input ends."""
    inbox, replies = serve_parent(ends_with_thread=True)
    follow_seeds()
    request = inbox.get()
    worker = _Worker(replies)
    worker.reply(request, lambda: worker.load(request))
    threading.Thread(target=_serve_all, args=(inbox, worker), daemon=True).start()
    worker.serve_main_thread()


def _serve_all(inbox: Inbox, worker: "_Worker") -> None:
    while True:
        threading.Thread(target=worker.serve, args=(inbox.get(),), daemon=True).start()


class _Worker:
    """The loaded tools, and the environments by number."""

    def __init__(self, replies: Replies) -> None:
        self._replies = replies
        self._process = os.getpid()
        self._tools: dict[str, Callable[..., Any]] = {}
        self._class: Callable[[], Any] | None = None
        self._agent: Callable[..., Any] | None = None
        self._environments: dict[int, Any] = {}
        self._unwanted: set[int] = set()
        self._of_main_thread: set[Any] = set()
        self._main_thread: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._run_loop, daemon=True).start()

    def _run_loop(self) -> None:
        while True:
            # A task of the user's that raises SystemExit ends the loop; the others go on.
            with contextlib.suppress(BaseException):
                self._loop.run_forever()

    def load(self, request: dict[str, Any]) -> dict[str, Any]:
        """Import the configured tools, environment and agent, and list their abilities; `describes` adds schemas."""
        functions = [_loaded("tools", spec) for spec in request["tools"]]
        self._tools = {function.__name__: function for function in functions}
        if request["environment"] is not None:
            self._class = _loaded("environment", request["environment"])
        if request["agent"] is not None:
            self._agent = _loaded("agent", request["agent"])
            _go_around_proxies()
        offered = dir(self._class) if self._class else []
        described = describe_tools(functions, self._class) if request["describes"] else []
        return {
            "schemas": described,
            "functions": list(self._tools),
            "methods": [name for name in offered if name[0] != "_" and self._is_tool(name)],
            "has_reward": "get_reward" in offered,
            "has_state": "get_state" in offered and "set_state" in offered,
            "restores": "restore" in offered,
        }

    def _is_tool(self, name: str) -> bool:
        return name not in NOT_TOOLS and callable(getattr(self._class, name))

    def serve(self, request: dict[str, Any]) -> None:
        """Answer one request."""
        actions: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
            "call": self._call,
            "build": self._build,
            "reward": self._reward,
            "forget": self._forget,
            "agent": self._run_agent,
            "ping": lambda _: {},
        }
        # If this process ends now, the parent knows that the call may have been made.
        self._replies.send({"begun": True, "request": request["request"]})
        self.reply(request, lambda: actions[request["do"]](request))

    def reply(self, request: dict[str, Any], action: Callable[[], dict[str, Any]]) -> None:
        """Send what `action` returns, or what it raises."""
        try:
            reply = action()
        except (_Refused, ToolsUnusable) as refused:
            reply = {"error": str(refused)}
        except BaseException as error:  # noqa: BLE001 - a user's code may raise anything, sys.exit included
            reply = {"error": describe(error)}
        if os.getpid() != self._process:
            os._exit(0)  # a process that the user's code has forked comes back here, too
        self._replies.send({**reply, "request": request["request"]})

    def _call(self, request: dict[str, Any]) -> dict[str, Any]:
        current = CurrentCall(*request["current"])
        CALL.set(current)
        draw_from(current.call_id)
        environment = self._environments[request["number"]] if request["number"] is not None else None
        name = request["name"]
        function = self._tools[name] if environment is None else getattr(environment, name)
        try:
            result = self._called(function, **request["arguments"])
            text, outcome = _text(result, request["characters_max"]), "answered"
        except BaseException as error:  # noqa: BLE001 - as above; the policy reads it
            text, outcome = _clean(f"error: {describe(error, place=False)}")[: request["characters_max"]], "raised"
        reply = {"result": text, "outcome": outcome}
        if environment is not None:
            reply |= self._state(environment)
        return reply

    def _build(self, request: dict[str, Any]) -> dict[str, Any]:
        """A new instance, reset, and brought to where an earlier one was."""
        assert self._class is not None
        draw_from(str(request["seed"]))
        environment = self._class()
        given = _accepted(environment.reset, request["columns"], request["seed"])
        text = self._called(environment.reset, **given)
        if text is not None and not isinstance(text, str):
            raise _Refused(f"reset returned {type(text).__name__}; allowed: str or None")
        if "state" in request:
            self._called(environment.set_state, request["state"])
        elif "turns" in request:
            self._called(environment.restore, request["turns"])
        self._environments[request["number"]] = environment
        if request["number"] in self._unwanted:
            self._unwanted.discard(request["number"])
            self._forget(request)  # that was asked for during the build
        return {"text": text}

    def _reward(self, request: dict[str, Any]) -> dict[str, Any]:
        return _as_reward("get_reward", self._called(self._environments[request["number"]].get_reward))

    def _run_agent(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._agent is not None
        draw_from(str(request["seed"]))
        given = _accepted(self._agent, request["columns"], request["seed"])
        # These come before columns of the same names.
        given |= {"base_url": request["base_url"], "api_key": request["api_key"]}
        value = self._agent(**given)
        # Each on a loop of its own: one that blocks its loop while it is not answered must not keep others waiting.
        return _as_reward("the agent", asyncio.run(_whole(value)) if inspect.isawaitable(value) else value)

    def _forget(self, request: dict[str, Any]) -> dict[str, Any]:
        # In this order, because a build may end meanwhile.
        self._unwanted.add(request["number"])
        environment = self._environments.pop(request["number"], None)
        if environment is not None:
            self._unwanted.discard(request["number"])
        if hasattr(environment, "close"):
            self._called(environment.close)
        return {}

    def _state(self, environment: Any) -> dict[str, Any]:
        if not (hasattr(environment, "get_state") and hasattr(environment, "set_state")):
            return {}
        state = self._called(environment.get_state)
        try:
            size = len(json.dumps(state, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise _Refused(f"get_state returned what is no JSON: {error}") from None
        if state is None or size > STATE_OBJECT_BYTES_MAX:
            what = "None" if state is None else f"{size} bytes of JSON"
            raise _Refused(f"get_state returned {what}; allowed: a value with at most {STATE_OBJECT_BYTES_MAX} bytes")
        return {"state": state}

    def serve_main_thread(self) -> NoReturn:
        """Make the calls reserved for the main thread, in their order of arrival."""
        while True:
            self._main_thread.get()()

    def _called(self, function: Callable[..., Any], /, *values: Any, **arguments: Any) -> Any:
        """What a function of the user returns; a coroutine is awaited."""
        called = getattr(function, "__func__", function)
        if called not in self._of_main_thread:
            try:
                return self._awaited(function(*values, **arguments))
            except ValueError as error:
                if _MAIN_THREAD_ONLY not in str(error):
                    raise
                # It limits its own time by an alarm, as tools for one thread do; this call got no further than that.
                self._of_main_thread.add(called)
        ended: Future[Any] = Future()
        context = contextvars.copy_context()

        def on_main_thread() -> None:
            try:
                ended.set_result(context.run(function, *values, **arguments))
            except BaseException as error:  # noqa: BLE001 - as in `reply`
                ended.set_exception(error)

        self._main_thread.put(on_main_thread)
        return self._awaited(ended.result())

    def _awaited(self, result: Any) -> Any:
        # One loop for all calls, because clients that a class keeps open belong to the loop that created them.
        if not inspect.isawaitable(result):
            return result
        value, error = asyncio.run_coroutine_threadsafe(_ended(result), self._loop).result()
        if error is not None:
            raise error
        return value


def _loaded(setting: str, spec: str) -> Any:
    try:
        return load_function(spec)
    except NotAFunction as error:
        raise _Refused(f"turns.{setting}: {spec!r}: {error}") from None
    except BaseException as error:  # noqa: BLE001 - an import may raise anything, sys.exit included
        raise _Refused(f"turns.{setting}: {spec!r} cannot be loaded: {describe(error)}") from None


async def _whole(result: Awaitable[Any]) -> Any:
    return await result


async def _ended(result: Awaitable[Any]) -> tuple[Any, BaseException | None]:
    """What an awaitable returns, or raises: SystemExit would end the loop."""
    try:
        return await result, None
    except BaseException as error:  # noqa: BLE001 - as above
        return None, error


def _as_reward(name: str, value: Any) -> dict[str, Any]:
    if value is None:
        return {"reward": None}
    reward = float(value)
    if not math.isfinite(reward):
        raise _Refused(f"{name} returned {reward}; allowed: a finite number or None")
    return {"reward": reward}


def _go_around_proxies() -> None:
    """Have clients of an agent reach this machine directly, whatever proxy the environment names for others."""
    for name in ("NO_PROXY", "no_proxy"):
        os.environ[name] = ",".join(filter(None, (os.environ.get(name), LOOPBACK)))


def _accepted(reset: Callable[..., Any], columns: dict[str, Any], seed: int) -> dict[str, Any]:
    """The arguments of a reset or an agent: the columns in the signature, and the seed for a parameter `seed`.

    A column with the name seed takes the place of the run's seed.
    """
    parameters = inspect.signature(reset).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    arguments = {name: value for name, value in columns.items() if takes_all or name in parameters}
    return {"seed": seed, **arguments} if "seed" in parameters else arguments


def _text(result: Any, characters_max: int) -> str:
    """A result as the policy reads it; a longer result is cut to the allowed characters and one more, as a sign."""
    if isinstance(result, dict | list):
        try:
            return _clean(json.dumps(result, ensure_ascii=False)[: characters_max + 1])
        except (TypeError, ValueError, RecursionError):
            pass  # it holds what JSON has not
    return _clean(str(result)[: characters_max + 1])


def _clean(text: str) -> str:
    # Half of a surrogate pair cannot be tokenised.
    return text.encode("utf-8", "replace").decode("utf-8")


if __name__ == "__main__":
    main()
