"""Ceph's S3 gateway on this machine for tests: one monitor, one store in memory, one radosgw, all on the loopback.

A real S3 server of other authorship than moto and AWS. Debian packages: ceph-mon ceph-osd radosgw ceph-common.
"""

import os
import shutil
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from tests.s3_server import KEY, SECRET

BINARIES = ("ceph-mon", "ceph-osd", "radosgw", "ceph", "ceph-authtool", "monmaptool", "radosgw-admin", "setpriv")
PACKAGES = "ceph-mon ceph-osd radosgw ceph-common"
START_S = 60
STOP_S = 10
# A client that asks before it has been told the cluster's id is refused, now and then.
ATTEMPTS = 3

# No authentication inside the cluster, one copy of everything. The monitor would wait 1 s before each of the dozen
# decisions of a start, and TCP 40 ms before each small answer.
CONFIGURATION = """
[global]
fsid = {fsid}
monmap = {folder}/monmap
paxos propose interval = 0.05
auth cluster required = none
auth service required = none
auth client required = none
auth supported = none
osd pool default size = 1
osd pool default min size = 1
mon allow pool size one = true
osd pool default pg num = 8
osd pool default pgp num = 8
osd pool default pg autoscale mode = off
mon max pg per osd = 1000
osd crush chooseleaf type = 0
osd crush update on start = false
osd class update on start = false
osd max object name len = 2048
public network = 127.0.0.0/8
cluster network = 127.0.0.0/8
ms bind ipv6 = false
ms bind msgr2 = false
run dir = {folder}
admin socket =
pid file =
log file = {folder}/$name.log
mon cluster log file = {folder}/cluster.log
mon data = {folder}/mon
osd data = {folder}/osd
osd objectstore = memstore
memstore device bytes = 4294967296
memstore page set = false
osd memory target = 1073741824
keyring = {folder}/keyring
rgw frontends = beast endpoint=127.0.0.1:{rgw_port} tcp_nodelay=1
"""


def why_not() -> str | None:
    """Why this machine cannot start the server, or None."""
    missing = [name for name in BINARIES if shutil.which(name) is None]
    return f"no {', '.join(missing)} on this machine (Debian: {PACKAGES})" if missing else None


@contextmanager
def radosgw_server() -> Iterator[str]:
    """The endpoint URL of a running server with the user KEY; its processes and files are gone afterwards."""
    with ExitStack() as cleanup:
        folder = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="radosgw-")))
        mon_port, rgw_port = _free_ports(2)
        fsid = str(uuid.uuid4())
        conf = folder / "ceph.conf"
        conf.write_text(CONFIGURATION.format(fsid=fsid, folder=folder, rgw_port=rgw_port))
        environment = os.environ | {"CEPH_CONF": str(conf), "CEPH_ARGS": ""}

        def tool(*command: str) -> None:
            for _ in range(ATTEMPTS):
                done = subprocess.run(
                    command, env=environment, capture_output=True, text=True, timeout=START_S, check=False
                )
                if done.returncode == 0:
                    return
            raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}: {done.stderr[-2000:]}")

        def daemon(*command: str) -> None:
            output = cleanup.enter_context((folder / f"{command[0]}.out").open("wb"))
            # The kernel ends it with this process, however that ends.
            bound = ["setpriv", "--pdeathsig", "KILL", *command, "-f"]
            process = subprocess.Popen(bound, env=environment, stdout=output, stderr=output)
            cleanup.callback(_stop, process)

        keyring, monmap = f"{folder}/keyring", f"{folder}/monmap"
        tool("ceph-authtool", "-C", keyring, "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
        caps = ("--cap", "mon", "allow *", "--cap", "osd", "allow *", "--cap", "mgr", "allow *")
        tool("ceph-authtool", keyring, "--gen-key", "-n", "client.admin", *caps)
        tool("monmaptool", "--create", "--addv", "a", f"[v1:127.0.0.1:{mon_port}]", "--fsid", fsid, monmap)
        tool("ceph-mon", "-i", "a", "--mkfs", "--monmap", monmap, "--keyring", keyring)
        daemon("ceph-mon", "-i", "a")
        disk = str(uuid.uuid4())
        tool("ceph", "--connect-timeout", str(START_S), "osd", "new", disk)
        # Left to itself, a starting OSD does this before it knows the cluster's id, and sometimes is refused.
        tool("ceph", "osd", "crush", "add", "osd.0", "1.0", "root=default", "host=localhost")
        (folder / "osd").mkdir()
        tool("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", disk)
        daemon("ceph-osd", "-i", "0")
        daemon("radosgw", "-n", "client.admin")
        endpoint = f"http://127.0.0.1:{rgw_port}"
        _wait_for(endpoint, folder)
        user = ("--uid=test", "--display-name=test", f"--access-key={KEY}", f"--secret-key={SECRET}")
        tool("radosgw-admin", "user", "create", *user)
        yield endpoint


def _free_ports(count: int) -> list[int]:
    with ExitStack() as sockets:
        bound = [sockets.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(count)]
        return [each.getsockname()[1] for each in bound]


def _wait_for(endpoint: str, folder: Path) -> None:
    give_up_s = time.monotonic() + START_S
    while time.monotonic() < give_up_s:
        with suppress(urllib.error.URLError, ConnectionError), urllib.request.urlopen(endpoint, timeout=5):
            return
        time.sleep(0.1)
    logs = "\n".join(path.read_text(errors="replace")[-500:] for path in sorted(folder.glob("*.out")))
    raise RuntimeError(f"radosgw did not answer within {START_S} s:\n{logs}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Nothing in it is worth an orderly end, which an OSD without a monitor may never reach."""
    process.kill()
    process.wait(STOP_S)
