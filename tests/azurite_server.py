"""Starts Azurite, Microsoft's emulator of Azure's storage, on the loopback; npm has it (CONTRIBUTING.md)."""

import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

CONTAINER = "gleaner-test"
# The account and key that Azurite publishes.
ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
LIMIT_S = 120


def program() -> str | None:
    """Azurite for blobs: what AZURITE_BLOB names, or azurite-blob of the PATH; None if there is none."""
    return os.environ.get("AZURITE_BLOB") or shutil.which("azurite-blob")


def free_port() -> int:
    with socket.socket() as reserved:
        reserved.bind(("127.0.0.1", 0))
        return int(reserved.getsockname()[1])


def wait_for(port: int, process: subprocess.Popen[bytes]) -> None:
    """Return when something listens on the port; raises if the process ends, or after LIMIT_S."""
    give_up_s = time.monotonic() + LIMIT_S
    while time.monotonic() < give_up_s and process.poll() is None:
        with socket.socket() as probe:
            if probe.connect_ex(("127.0.0.1", port)) == 0:
                return
        time.sleep(0.1)
    raise RuntimeError(f"{process.args!r} does not listen on port {port}; exit status {process.poll()}")


@contextmanager
def azurite_server() -> Iterator[str]:
    """The URL of a running Azurite with one container."""
    command, port = program(), free_port()
    assert command is not None
    options = ["--blobHost", "127.0.0.1", "--blobPort", str(port)]
    switches = ["--inMemoryPersistence", "--disableTelemetry", "--skipApiVersionCheck", "--silent"]
    with subprocess.Popen([command, *options, *switches], stdout=subprocess.DEVNULL) as process:
        try:
            wait_for(port, process)
            make_container(f"http://127.0.0.1:{port}")
            yield f"http://127.0.0.1:{port}"
        finally:
            process.terminate()


def make_container(endpoint: str) -> None:
    from azure.storage.blob import BlobServiceClient  # noqa: PLC0415 - comes with adlfs, and few tests need it

    credential = {"account_name": ACCOUNT, "account_key": KEY}
    with BlobServiceClient(f"{endpoint}/{ACCOUNT}", credential=credential) as client:
        client.create_container(CONTAINER)


def point_to(endpoint: str, environment: pytest.MonkeyPatch) -> None:
    """Let CloudStore meet this server, and nothing else of the machine's configuration."""
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        environment.delenv(name)
    environment.setenv("AZURE_STORAGE_USE_EMULATOR", "true")
    environment.setenv("AZURITE_BLOB_STORAGE_URL", endpoint)
