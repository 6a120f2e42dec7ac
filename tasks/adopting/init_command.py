"""The command `gleaner init`: converts a configuration of TRL or verl."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from resources.documents import BYTES_MAX
from resources.regular_files import open_file
from tasks.adopting import trl_defaults, trl_script, trl_teacher, verl_defaults, verl_meaning, verl_script
from tasks.adopting.adoption import Adoption, NotAdopted, Setting, text_of


class Library(NamedTuple):
    """A library whose configurations can be converted.

    Attributes:
        name: the library's name.
        read: function from a file's text, its path and the words behind the file to settings.
        carry_over: function that decides about the settings.
        defaults: the library's defaults by setting.
    """

    name: str
    read: Callable[[str, Path, Sequence[str]], list[Setting]]
    carry_over: Callable[[Adoption], None]
    defaults: Mapping[str, Any]


LIBRARIES = {
    "trl": Library("TRL", trl_script.read, trl_teacher.carry_over, trl_defaults.ALL),
    "verl": Library("verl", verl_script.read, verl_meaning.carry_over, verl_defaults.DEFAULTS),
}


@click.command(
    short_help="Write a configuration from one of TRL or verl.", context_settings={"ignore_unknown_options": True}
)
@click.option("--from", "library", type=click.Choice([*LIBRARIES]), required=True, help="The library that FILE is for.")
@click.argument("file", type=click.Path(path_type=Path))
@click.argument("words", nargs=-1, type=click.UNPROCESSED)
@click.option("--to", "target", type=click.Path(path_type=Path), default=Path("run.yaml"), show_default=True)
def init(library: str, file: Path, words: tuple[str, ...], target: Path) -> None:
    """Write a configuration from FILE, which is read and not executed.

    For TRL, FILE is a script of its trainers for GRPO, SFT, DPO, GKD or distillation, or the YAML file of `trl grpo
    --config`; for verl, a shell script or a YAML file. WORDS are what follows FILE on your command line:
    `--learning_rate 1e-6` for TRL, `data.seed=1` for verl.

    Says what was not carried over, line by line, and what you must fill in. Never overwrites a file.
    """
    adoption = adopt(library, file, words)
    text = text_of(adoption, file.name)
    try:
        with target.open("x", encoding="utf-8") as written:
            written.write(text)
    except FileExistsError:
        raise ValueError(f"--to: {target} exists; allowed: a file that does not exist") from None
    except OSError as error:
        raise ValueError(f"--to: {target} cannot be written: {error.strerror}") from None
    for each in adoption.messages:
        click.echo(f"{each.kind}: {each}")
    for field, what in adoption.missing.items():
        click.echo(f"fill in: {field}: {what}")
    click.echo(f"written: {target}, with {len(adoption.fields)} fields")


def adopt(library: str, file: Path, words: Sequence[str] = ()) -> Adoption:
    """The conversion of the settings in a file; raises ValueError, in one line, for a file without settings."""
    known = LIBRARIES[library]
    try:
        adoption = Adoption(known.read(_text(file), file, words), known.name, known.defaults)
        known.carry_over(adoption)
    except NotAdopted as error:
        raise ValueError(f"{file}: {error}") from None
    return adoption


def _text(file: Path) -> str:
    try:
        with open_file(file) as opened:
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
