"""The command `gleaner init`: writes a configuration from the one of another library."""

from collections.abc import Callable
from pathlib import Path

import click

from resources.documents import BYTES_MAX
from tasks.adopting import trl_meaning, verl_meaning
from tasks.adopting.adoption import FILL_IN, Adoption, NotAdopted, Setting, text_of
from tasks.adopting.trl_script import read_script
from tasks.adopting.verl_script import read_overrides

# By name: how the library calls itself, what reads a file of it, and what decides about the settings.
LIBRARIES: dict[str, tuple[str, Callable[[str], list[Setting]], Callable[[Adoption], None]]] = {
    "trl": ("TRL", read_script, trl_meaning.carry_over),
    "verl": ("verl", read_overrides, verl_meaning.carry_over),
}


@click.command(short_help="Write a configuration from one of TRL or verl.")
@click.option("--from", "library", type=click.Choice([*LIBRARIES]), required=True, help="The library that FILE is for.")
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--to", "target", type=click.Path(path_type=Path), default=Path("run.yaml"), show_default=True)
def init(library: str, file: Path, target: Path) -> None:
    """Write a configuration from a TRL script (FILE), which is read and not executed, or from a shell script for verl.

    Says what was not carried over, line by line, and what you must fill in. Never overwrites a file.
    """
    adoption = adopt(library, file)
    text = text_of(adoption, file.name)
    try:
        with target.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise ValueError(f"--to: {target} exists; allowed: a file that does not exist") from None
    except OSError as error:
        raise ValueError(f"--to: {target} cannot be written: {error.strerror}") from None
    for left in adoption.left:
        click.echo(f"not carried over: {left}")
    for field in adoption.missing:
        click.echo(f"fill in: {field}: {FILL_IN[field][0]}")
    click.echo(f"written: {target}, with {len(adoption.fields)} fields")


def adopt(library: str, file: Path) -> Adoption:
    """What becomes of the settings in a file; raises ValueError, in one line, if there are none."""
    name, read, carry_over = LIBRARIES[library]
    try:
        adoption = Adoption(read(_text(file)), name)
        carry_over(adoption)
    except NotAdopted as error:
        raise ValueError(f"{file}: {error}") from None
    return adoption


def _text(file: Path) -> str:
    try:
        with file.open("rb") as opened:
            body = opened.read(BYTES_MAX + 1)
    except OSError as error:
        raise NotAdopted(f"cannot be read: {error.strerror}") from None
    if len(body) > BYTES_MAX:
        raise NotAdopted(f"it is more than {BYTES_MAX} bytes long")
    try:
        return body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = body.count(b"\n", 0, error.start) + 1
        raise NotAdopted(f"line {line}: byte 0x{body[error.start]:02x} is not UTF-8") from None
