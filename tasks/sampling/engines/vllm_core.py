"""Core: a small interface to vLLM, in a process of its own or in ours: requests, outputs, weights and shutdown.

A request that vLLM refuses raises EngineError; every other failure in vLLM raises EngineDied. Every wait for vLLM in a
process of its own has a time limit; a call that hangs in our own process cannot be ended.
"""

import asyncio
import gc
import logging
import multiprocessing
import queue
import threading
import time
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from tasks.sampling.engines.engine import EngineDied, EngineError
from tasks.sampling.engines.vllm_names import resolve
from tasks.sampling.engines.vllm_settings import Limits

log = logging.getLogger(__name__)
CLOSE_TIMEOUT_S = 20.0
GIVE_UP_INTERVAL_S = 0.2
CACHE_RESETS_MAX = 50
CACHE_RESET_INTERVAL_S = 0.02
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class CoreRequest:
    """A request to vLLM.

    Attributes:
        name: a name that no earlier request of the engine had.
        token_ids: the tokens of prompt and prefix.
        params: vLLM's SamplingParams.
        salt: requests share cached prompts only under one salt.
        adapter: vLLM's LoRARequest of the loaded adapter; None: no adapter.
    """

    name: str
    token_ids: list[int]
    params: Any
    salt: str
    adapter: Any = None


@dataclass(frozen=True, slots=True)
class WorkerCall:
    """A call of every worker.

    Attributes:
        method: the name of a method of vllm_worker.WorkerExtension.
        args: the arguments of the method.
    """

    method: str
    args: tuple[Any, ...]


class Core(Protocol):
    """A running vLLM, used by one thread. After EngineDied, only `close` may be called."""

    def start(self, requests: Sequence[CoreRequest]) -> None:
        """Submit all requests, or none and raise EngineError if vLLM refuses one."""
        ...

    def outputs(self) -> list[Any]:
        """Wait for vLLM's next RequestOutputs and return all that have arrived; the list may be empty."""
        ...

    def abort(self, names: Sequence[str]) -> None: ...

    def load(self, call: WorkerCall, version: str) -> list[Any]:
        """Change weights or the adapter, drop the cache computed with the old, and return what each worker does."""
        ...

    def call(self, call: WorkerCall) -> None:
        """Have every worker do something that changes no weights."""
        ...

    def tell(self, call: WorkerCall) -> None:
        """As `call`, without waiting for the workers; a failure there is logged and nothing more."""
        ...

    def close(self) -> None:
        """End vLLM, also after EngineDied."""
        ...


class SameProcess:
    """vLLM in the member's process: the start takes seconds, but a hang or crash of vLLM is the member's, too."""

    def __init__(self, vllm_config: Any) -> None:
        try:
            self._engine = resolve("LLMEngine").from_vllm_config(vllm_config, disable_log_stats=True)
        except Exception as error:
            raise died("does not start", error) from error

    def start(self, requests: Sequence[CoreRequest]) -> None:
        tokens_input, names = resolve("tokens_input"), [request.name for request in requests]
        try:
            for request in requests:
                prompt = tokens_input(request.token_ids, cache_salt=request.salt)
                self._engine.add_request(request.name, prompt, request.params, lora_request=request.adapter)
        except (ValueError, resolve("VLLMClientError")) as error:
            self.abort(names)
            raise EngineError(f"vLLM refuses a request: {error}") from error
        except Exception as error:
            raise died("does not take requests", error) from error

    def outputs(self) -> list[Any]:
        try:
            found: list[Any] = self._engine.step()
        except Exception as error:
            raise died("failed in a step", error) from error
        return found

    def abort(self, names: Sequence[str]) -> None:
        try:
            self._engine.abort_request(list(names))
        except Exception as error:
            raise died("does not abort", error) from error

    def load(self, call: WorkerCall, version: str) -> list[Any]:
        try:
            results: list[Any] = self._engine.collective_rpc(call.method, args=call.args)
            self._engine.set_weight_version(version)
            reset = bool(self._engine.reset_prefix_cache())  # in this process, an abort frees its blocks at once
        except Exception as error:
            raise died("failed to load weights", error) from error
        return loaded(results, reset)

    def call(self, call: WorkerCall) -> None:
        try:
            self._engine.collective_rpc(call.method, args=call.args)
        except Exception as error:
            raise died(f"failed in {call.method}", error) from error

    def tell(self, call: WorkerCall) -> None:
        try:
            self.call(call)
        except EngineDied as error:
            log.warning("%s", error)

    def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            try:
                engine.engine_core.shutdown()
            except Exception as error:  # noqa: BLE001 - the engine is discarded anyway
                log.warning("vLLM did not shut down cleanly: %s", error)
        del engine
        gc.collect()


class OwnProcess:
    """vLLM's asynchronous engine, which decodes in separate processes; a thread of the member receives the outputs."""

    def __init__(self, vllm_config: Any, limits: Limits) -> None:
        self._limits = limits
        self._arrived: queue.SimpleQueue[list[Any]] = queue.SimpleQueue()
        self._collectors: dict[str, Any] = {}
        self._ready = asyncio.Event()
        self._engine: Any = None
        self._children: set[Any] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        others = set(multiprocessing.active_children())
        try:
            self._engine = self._wait(self._build(vllm_config), limits.start_s, "starting")
        except BaseException:
            self._give_up(others)
            raise
        self._children = set(multiprocessing.active_children()) - others

    def start(self, requests: Sequence[CoreRequest]) -> None:
        self._wait(self._start(requests), self._limits.step_s, "taking requests")

    def outputs(self) -> list[Any]:
        limit_s = self._limits.step_s
        try:
            found = self._arrived.get(timeout=limit_s)
        except queue.Empty:
            raise EngineDied(f"vLLM has sent no token for {limit_s:g} s") from None
        while not self._arrived.empty():
            found += self._arrived.get()
        for item in found:
            if isinstance(item, BaseException):
                raise died("failed while decoding", item) from item
        return found

    def abort(self, names: Sequence[str]) -> None:
        self._wait(self._abort(names), self._limits.step_s, "aborting")

    def load(self, call: WorkerCall, version: str) -> list[Any]:
        return self._wait(self._load(call, version), self._limits.load_s, "loading weights")

    def call(self, call: WorkerCall) -> None:
        self._wait(self._engine.collective_rpc(call.method, args=call.args), self._limits.step_s, call.method)

    def tell(self, call: WorkerCall) -> None:
        told = self._engine.collective_rpc(call.method, args=call.args)
        asyncio.run_coroutine_threadsafe(told, self._loop).add_done_callback(_log_failure)

    def close(self) -> None:
        """End vLLM's processes, by force if they do not end by themselves, and end the thread."""
        engine, self._engine = self._engine, None
        if engine is not None:
            stopper = threading.Thread(target=engine.shutdown, daemon=True)
            stopper.start()
            stopper.join(CLOSE_TIMEOUT_S)
        for child in self._children:
            child.kill()
            child.join(CLOSE_TIMEOUT_S)
        self._end_thread(CLOSE_TIMEOUT_S)

    def _give_up(self, others: set[Any]) -> None:
        """After a failed or timed-out start, kill the processes that it has started or is still starting."""
        deadline_s = time.monotonic() + CLOSE_TIMEOUT_S
        while True:
            for child in set(multiprocessing.active_children()) - others:
                child.kill()
                child.join(CLOSE_TIMEOUT_S)
            if self._end_thread(GIVE_UP_INTERVAL_S) or time.monotonic() > deadline_s:
                return

    def _end_thread(self, limit_s: float) -> bool:
        """Stop the event loop; whether its thread ends within the limit, in which case the loop is closed too."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._stop)
            self._thread.join(limit_s)
            if not self._thread.is_alive():
                self._loop.close()
        return not self._thread.is_alive()

    async def _build(self, vllm_config: Any) -> Any:
        self._listener = self._loop.create_task(self._listen())
        return resolve("AsyncLLM").from_vllm_config(vllm_config, disable_log_stats=True)

    async def _start(self, requests: Sequence[CoreRequest]) -> None:
        tokens_input, begun = resolve("tokens_input"), []
        try:
            for request in requests:
                prompt = tokens_input(request.token_ids, cache_salt=request.salt)
                collector = await self._engine.add_request(
                    request.name, prompt, request.params, lora_request=request.adapter
                )
                begun.append((request.name, collector))
        except (ValueError, resolve("VLLMClientError")) as error:
            await self._engine.abort([name for name, _ in begun])
            raise EngineError(f"vLLM refuses a request: {error}") from error
        for name, collector in begun:
            # One event for all requests: a task per request would cost more than the rest of the listening together.
            collector.ready = self._ready
            self._collectors[name] = collector
        self._ready.set()

    async def _listen(self) -> None:
        """Pass vLLM's outputs to the thread that waits for tokens, with all requests' outputs of a turn in one list."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            found = [item for item in map(self._take, list(self._collectors.items())) if item is not None]
            if found:
                self._arrived.put(found)

    def _take(self, entry: tuple[str, Any]) -> Any:
        """The next output or the error of one request, or None."""
        name, collector = entry
        try:
            output = collector.get_nowait()
        except Exception as error:  # noqa: BLE001 - `outputs` raises it
            output = error
        if isinstance(output, Exception) or (output is not None and output.finished):
            del self._collectors[name]
        return output

    async def _abort(self, names: Sequence[str]) -> None:
        for name in names:
            self._collectors.pop(name, None)
        await self._engine.abort(list(names))

    async def _load(self, call: WorkerCall, version: str) -> list[Any]:
        results: list[Any] = await self._engine.collective_rpc(call.method, args=call.args)
        await self._engine.update_weight_version(version)
        # Requests that were just aborted may still hold blocks; vLLM frees them in its next turn.
        for _ in range(CACHE_RESETS_MAX):
            if await self._engine.reset_prefix_cache():
                return loaded(results, True)
            await asyncio.sleep(CACHE_RESET_INTERVAL_S)
        return loaded(results, False)

    def _wait(self, coroutine: Coroutine[Any, Any, Result], limit_s: float, what: str) -> Result:
        """Run the coroutine in the loop's thread and wait at most limit_s, even if that thread is stuck."""
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            return future.result(limit_s)
        except EngineError:
            raise
        except TimeoutError as error:
            future.cancel()
            if future.done() and not future.cancelled():
                raise died(f"failed {what}", error) from error
            raise EngineDied(f"vLLM was still {what} after {limit_s:g} s") from error
        except (Exception, CancelledError) as error:
            raise died(f"failed {what} (its own log says more)", error) from error

    def _stop(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        # Stop one turn later, so that the tasks see their cancellation.
        self._loop.call_soon(self._loop.stop)


def died(what: str, error: BaseException) -> EngineDied:
    """An EngineDied whose message gives the cause in one line."""
    return EngineDied(f"vLLM {what}: {type(error).__name__}: {' '.join(str(error).split()) or 'no message'}")


def _log_failure(future: "Future[Any]") -> None:
    if not future.cancelled() and (error := future.exception()) is not None:
        log.warning("%s", died("failed in a worker", error))


def loaded(results: list[Any], reset: bool) -> list[Any]:
    """Return the workers' results, or raise EngineDied if vLLM did not drop the cache of the old weights."""
    if not reset:
        raise EngineDied("vLLM keeps its cache of the old weights: something is still in flight there")
    return results
