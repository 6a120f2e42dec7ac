"""Rules for all servers of this machine: the names that a server answers to, and the log of a bad request.

A foreign page can point a name of its own at this machine, and have a browser here send requests to the name. The Host
header then holds the foreign name, so a server answers only to names and addresses at which it listens.
"""

import ipaddress
import logging
import re
import socket
from collections.abc import MutableMapping
from functools import cache
from typing import Any

LOOPBACK = "127.0.0.1"
_LOOPBACK_NAMES = frozenset({LOOPBACK, "localhost", "::1"})
_HOST = re.compile(r"(?:\[(?P<v6>[0-9a-fA-F:.]+)\]|(?P<name>[A-Za-z0-9._-]+))(?::\d{1,5})?")
_UNSPECIFIED = "0.0.0.0"  # noqa: S104 - compared, not bound


def answers_to(host: str | None, bound: str, address: str = "") -> bool:
    """Whether a Host header names a server.

    bound: the configured name or address. address: the address at which the server listens; "": as configured. A server
    that listens at all addresses answers to every address, because a page cannot own an address, and to the names of
    this machine.
    """
    match = _HOST.fullmatch(host or "")
    if match is None:
        return False
    name = (match["v6"] or match["name"]).lower().removesuffix(".")
    address = address or bound
    if name in (bound.lower().removesuffix("."), address):
        return True
    if address == _UNSPECIFIED:
        return name == "localhost" or _is_address(name) or name in _own_names()
    return _is_address(address) and ipaddress.ip_address(address).is_loopback and name in _LOOPBACK_NAMES


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


@cache
def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


class WithoutTracebacks(logging.LoggerAdapter[logging.Logger]):
    """The log of a server: whatever a client sends is no news, and an error of our own is one line."""

    def exception(self, msg: object, *args: object, exc_info: Any = True, **_: Any) -> None:
        """Log an error that is being handled, or that `exc_info` is."""
        error = exc_info if isinstance(exc_info, BaseException) else None
        level = logging.DEBUG if getattr(error, "code", 0) == 400 or isinstance(error, OSError) else logging.ERROR
        self.log(level, f"{msg}: %s: %s", *args, type(error).__name__, error)

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Drop what would be printed below the line."""
        kwargs.pop("exc_info", None)
        return msg, kwargs
