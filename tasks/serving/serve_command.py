"""The command `gleaner serve`: OpenAI's API in front of a run, for clients that know a secret."""

import asyncio
import os
import signal
import stat
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from storage.clock import SystemClock
from storage.errors import WrongInputError
from storage.records.run import AnotherRun, connect_to_run, holds_run, read_run
from storage.stores.connect import connect
from tasks.configuration.data import SUBMITTED
from tasks.configuration.overrides import document_with, load_with
from tasks.configuration.run_config import RunConfig, changes, parse_held
from tasks.external.rollouts import Rollouts
from tasks.reporting.config_argument import GivenConfig, config_argument
from tasks.reporting.finite_number import FiniteNumber
from tasks.reporting.metrics_outlets import read_address

if TYPE_CHECKING:
    from tasks.serving.request_server import RequestServer
    from tasks.serving.windows import Windows

KEY_VARIABLE = "GLEANER_SERVE_KEY"
KEY_CHARACTERS_MIN = 16
LEAVE_S = 5.0
# Windows that a new run plans ahead of its oldest one; the most that algorithm.max_staleness allows.
WINDOWS_AHEAD = 8


class NotServed(WrongInputError):  # noqa: N818 - reads as what happened
    """A setting of the run, or of the command, with which a run cannot be served."""


@click.command(short_help="Answer OpenAI's API with responses of a run.")
@config_argument(required=False)
@click.option("--run", "run_url", metavar="URL", help="An existing run, instead of CONFIG.")
@click.option("--listen", metavar="[HOST:]PORT", default="8000", show_default=True, help="On 127.0.0.1 without HOST.")
@click.option(
    "--key-file", type=click.Path(path_type=Path), help=f"The clients' API key. Default: the variable {KEY_VARIABLE}."
)
@click.option(
    "--window-s", type=FiniteNumber(min=0), default=0.2, show_default=True, help="How long a window takes requests."
)
@click.option(
    "--timeout-s",
    type=FiniteNumber(min=0, min_open=True),
    default=600.0,
    show_default=True,
    help="The longest wait of a request.",
)
def serve(
    config: GivenConfig | None,
    run_url: str | None,
    listen: str,
    key_file: Path | None,
    window_s: float,
    timeout_s: float,
) -> None:
    """Serve OpenAI's API, and what Tinker's client samples, until Ctrl-C; members (`gleaner join`) generate.

    OpenAI's are /v1/completions and /v1/chat/completions. The run has trainer.placement "external" and data.source
    "submitted". Every response is in the run. A request with the header Idempotency-Key, and each of Tinker's client,
    has one answer, whichever processes die.
    """
    if (config is None) == (run_url is None):
        raise NotServed("serve: allowed: CONFIG [FIELD=VALUE]..., or --run URL")
    address, secret = read_address(listen, "--listen"), _secret(key_file)
    settings = read_settings(config) if config is not None else _held(str(run_url))
    _check(settings)
    from tasks.serving.request_book import RequestBook  # noqa: PLC0415 - libraries that take longer than most commands
    from tasks.serving.request_server import RequestServer  # noqa: PLC0415
    from tasks.serving.served_model import opened_model  # noqa: PLC0415
    from tasks.serving.windows import Windows  # noqa: PLC0415

    # Outside the event loop, so that Ctrl-C ends a download.
    with opened_model(settings) as model, Rollouts(settings) as rollouts:
        windows = Windows(rollouts, SystemClock(), window_s)
        book = RequestBook(connect(rollouts.url), windows, model)
        server = RequestServer(book, model, settings.sampling, secret=secret, timeout_s=timeout_s)
        asyncio.run(_serve(server, windows, rollouts.url, address))


async def _serve(server: "RequestServer", windows: "Windows", run_url: str, address: tuple[str, int]) -> None:
    """Answer until SIGINT, SIGTERM or an error of the windows, which is raised."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    errors: list[BaseException] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, ended.set)

    def work() -> None:
        try:
            windows.serve()
        except BaseException as error:  # noqa: BLE001 - raised again by the command
            errors.append(error)
            windows.end(error)
            with suppress(RuntimeError):  # the command may have ended
                loop.call_soon_threadsafe(ended.set)

    thread = threading.Thread(target=work, name="windows", daemon=True)
    runner = await server.start(*address)
    try:
        thread.start()
        host, port = runner.addresses[0][:2]
        click.echo(f"serving {run_url} at http://{host}:{port}/v1 (Ctrl-C ends)", err=True)
        await ended.wait()
    finally:
        await runner.cleanup()
        windows.close()
        if thread.is_alive():
            # A window may take hours; its iteration goes on in the next life of the server.
            await asyncio.to_thread(thread.join, LEAVE_S)
    if errors:
        raise errors[0]


def read_settings(config: GivenConfig) -> RunConfig:
    """The configuration; where it does not name algorithm.max_staleness, that of the run, or WINDOWS_AHEAD."""
    settings, document = config.load(), document_with(config.path, config.overrides)
    if "max_staleness" in (document.get("algorithm") or {}):
        return settings
    is_new = not holds_run(connect(settings.run.url))
    ahead = WINDOWS_AHEAD if is_new else _held(settings.run.url).algorithm.max_staleness
    return load_with(config.path, (*config.overrides, f"algorithm.max_staleness={ahead}"))


def _held(run_url: str) -> RunConfig:
    store = connect_to_run(run_url)
    held = parse_held(read_run(store).config)
    return replace(held, run=replace(held.run, url=store.url))


def _check(config: RunConfig) -> None:
    """Raise NotServed for a setting that cannot be served, and AnotherRun if the run has other settings."""
    if config.data.source != SUBMITTED:
        raise NotServed(f"data.source: value {config.data.source!r}; allowed for serve: {SUBMITTED!r}")
    if config.turns is not None:
        raise NotServed("turns: given; allowed for serve: none, because the client has the conversation")
    if config.rewards:
        raise NotServed(f"rewards: {len(config.rewards)} given; allowed for serve: [], because the client grades")
    store = connect(config.run.url)
    if holds_run(store):
        unlike = changes(config, parse_held(read_run(store).config))
        # Else requests would be accepted that no plan of the run can hold.
        if unlike:
            raise AnotherRun(store.url, unlike)


def _secret(file: Path | None) -> str:
    """The clients' API key; raises NotServed, which does not repeat it."""
    if file is None:
        found, source = os.environ.get(KEY_VARIABLE, ""), KEY_VARIABLE
    else:
        found, source = file.read_text(encoding="utf-8").strip(), f"--key-file: value {str(file)!r}"
        if file.stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise NotServed(f"{source}; allowed: a file that its owner alone can read (chmod 600)")
    if len(found) < KEY_CHARACTERS_MIN or not found.isascii() or not found.isprintable() or " " in found:
        raise NotServed(
            f"{source}: allowed: at least {KEY_CHARACTERS_MIN} visible ASCII characters, the clients' API key, in the "
            f"variable {KEY_VARIABLE} or in --key-file"
        )
    return found
