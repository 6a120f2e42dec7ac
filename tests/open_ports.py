"""The ports at which processes listen, as the kernel lists them, and who can reach those."""

import ipaddress
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_LISTENS = "0A"
# The address of documentation (RFC 5737): no packet is sent, only a route is looked up.
_ELSEWHERE = ("198.51.100.1", 9)
CONNECT_LIMIT_S = 5.0


@dataclass(frozen=True)
class Listener:
    """A port at which a process listens. command: its command line."""

    process: int
    command: str
    address: str
    port: int

    @property
    def on_loopback(self) -> bool:
        return ipaddress.ip_address(self.address).is_loopback


def listeners(processes: Sequence[int]) -> list[Listener]:
    """Every TCP port at which one of these processes listens now."""
    return [listener for process in processes for listener in _of(process)]


def _of(process: int) -> Iterator[Listener]:
    root = Path(f"/proc/{process}")
    with suppress(OSError):
        command = (root / "cmdline").read_bytes().replace(b"\0", b" ").decode()
        sockets = {inode for each in (root / "fd").iterdir() if (inode := _inode(each)) is not None}
        for name in ("tcp", "tcp6"):
            for line in (root / "net" / name).read_text().splitlines()[1:]:
                _, local, _, state, *rest = line.split()
                if state == _LISTENS and rest[5] in sockets:
                    address, port = local.split(":")
                    yield Listener(process, command, _address(address), int(port, 16))


def _inode(descriptor: Path) -> str | None:
    """The inode of the socket that a descriptor is; None for all else."""
    try:
        target = str(descriptor.readlink())
    except OSError:
        return None
    return target[len("socket:[") : -1] if target.startswith("socket:[") else None


def _address(text: str) -> str:
    """An address as the kernel writes it: words of four bytes, each in the machine's order."""
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    found = ipaddress.ip_address(b"".join(words))
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return str(mapped or found)


def own_address() -> str | None:
    """An address of this machine at which other machines would reach it; None without one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            asked.connect(_ELSEWHERE)
        except OSError:
            return None
        address = str(asked.getsockname()[0])
    return None if ipaddress.ip_address(address).is_loopback else address


def answers_at(address: str, port: int) -> bool:
    """Whether something takes a connection there."""
    with socket.socket() as peer:
        peer.settimeout(CONNECT_LIMIT_S)
        return peer.connect_ex((address, port)) == 0
