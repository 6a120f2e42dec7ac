"""The code of this package: its files, and a digest by which pods of an execution know that they have the same.

A pod has the code of its image, or of an upload laid over the image, so pods of one execution may hold different code.
"""

import hashlib
import json
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("storage", "resources", "tasks", "workflows", "workflows_flyte2")
# Of what a process reads at run time: modules, and the parts of the page.
_SUFFIXES = {".py", ".css", ".html", ".js"}
_DIGITS = 12


class OtherCode(RuntimeError):  # noqa: N818 - reads as what happened
    """This process runs other code than its execution was started with."""


def code_files(root: Path = ROOT) -> list[Path]:
    """The package's files in a fixed order. root: the folder that holds the packages."""
    return sorted(path for name in PACKAGES for path in (root / name).rglob("*.*") if path.suffix in _SUFFIXES)


def code_digest(root: Path = ROOT) -> str:
    """12 hexadecimal digits: equal for equal files of the package, different after any change of them."""
    code = {path.relative_to(root).as_posix(): _digest(path.read_bytes()) for path in code_files(root)}
    return _digest(json.dumps(code, sort_keys=True).encode())[:_DIGITS]


def refuse_other_code(expected: str, root: Path = ROOT) -> None:
    """Raise OtherCode, with both digests, unless this process has the code of that digest; empty: any code will do."""
    if expected and (own := code_digest(root)) != expected:
        raise OtherCode(
            f"code {own} in this pod; allowed: {expected}, with which the execution was registered. Build the image "
            "from the checkout that registers; `python -m workflows.version --code` prints the digest of either"
        )


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
