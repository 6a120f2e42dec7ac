"""Resolves ids on the hub to commits, and models to folders of its cache, on the network or without it."""

import hashlib
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from resources.model_config import CONFIG
from storage.errors import WrongInputError
from storage.paths import expanded
from storage.records import model_files
from tasks.hub.careful_client import COMMIT, WrongAnswer, ask_with_care
from tasks.learning.pretrained import count_parameters as count_in_folder

Kind = Literal["model", "dataset"]
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*/[A-Za-z0-9][A-Za-z0-9._-]*")
# What a model folder is read for; the patterns of huggingface_hub, in which a star matches "/" too.
_PATTERNS = [f"*{suffix}" for suffix in sorted(model_files.SUFFIXES | {".safetensors"})]
_WEIGHTS, _INDEX = "model.safetensors", "model.safetensors.index.json"
_DEEPER = ["*/*"]
_BLOCK_BYTES = 1 << 20


class HubError(WrongInputError):
    """A repository of the hub cannot be used; the message is a line that begins with the configuration's field."""


def names_repository(path: str) -> bool:
    """Whether a configured path is an id such as Qwen/Qwen2.5-0.5B-Instruct, and no existing path."""
    if _ID.fullmatch(path) is None:
        return False
    try:
        return not expanded(path).exists()
    except (OSError, ValueError):
        return False


def commit_of(kind: Kind, repo: str, revision: str | None, field: str) -> str:
    """The commit that a revision names: a branch, a tag or a commit; None is the default branch.

    Without the network, the commit comes from the cache of huggingface_hub. Raises HubError.
    """
    import huggingface_hub  # noqa: PLC0415 - few configurations need it

    with explained(kind, repo, revision, field):
        commit = str(huggingface_hub.HfApi().resolve_revision(repo, repo_type=kind, revision=revision).resolved)
        if not COMMIT.fullmatch(commit):
            raise WrongAnswer(f"its commit is {commit[:80]!r}; allowed: 40 hexadecimal digits")
        return commit


def model_folder(repo: str, commit: str, field: str) -> Path:
    """The folder of a model at a commit: safetensors, text and tokenizer files, never pickles or code.

    Each file is compared with its digest, which is the file's name in the cache. Raises HubError.
    """
    import huggingface_hub  # noqa: PLC0415

    bars_only_on_a_terminal(huggingface_hub.utils)
    with explained("model", repo, commit, field):
        _check_before_download(repo, commit, field)
        folder = huggingface_hub.snapshot_download(
            repo, revision=commit, allow_patterns=_PATTERNS, ignore_patterns=_DEEPER
        )
    _check_files(Path(folder), field)
    return Path(folder)


def model_config(repo: str, commit: str, field: str) -> Path:
    """A folder that holds at least a model's config.json at a commit; nothing else is downloaded. Raises HubError."""
    import huggingface_hub  # noqa: PLC0415

    with explained("model", repo, commit, field):
        file = Path(huggingface_hub.hf_hub_download(repo, CONFIG, revision=commit))
    _check_file(file, field)
    return file.parent


def count_parameters(repo: str, commit: str, field: str) -> int:
    """The number of values in a model's tensors at a commit, from the headers of its files on the hub.

    No weights are downloaded; with HF_HUB_OFFLINE the count comes from weights in the cache. Raises HubError.
    """
    import huggingface_hub  # noqa: PLC0415

    if huggingface_hub.constants.HF_HUB_OFFLINE:
        return count_in_folder(model_folder(repo, commit, field))
    with explained("model", repo, commit, field), _index_understood(repo, field):
        api = huggingface_hub.HfApi()
        names = api.list_repo_files(repo, revision=commit)
        _check_has_safetensors(names, repo, field)
        if _WEIGHTS in names:
            names = [_WEIGHTS]
        elif _INDEX in names:
            index = json.loads(Path(huggingface_hub.hf_hub_download(repo, _INDEX, revision=commit)).read_bytes())
            names = sorted(set(index["weight_map"].values()))
        headers = [
            api.parse_safetensors_file_metadata(repo, name, revision=commit) for name in names if _is_weights(name)
        ]
    return sum(count for header in headers for count in header.parameter_count.values())


def bars_only_on_a_terminal(library: Any) -> None:
    """Turn off the progress bars of huggingface_hub.utils or datasets.utils in pods and in logs."""
    if not sys.stderr.isatty():
        with warnings.catch_warnings():
            # HF_HUB_DISABLE_PROGRESS_BARS=0 asks for them all the same, and the library says so.
            warnings.simplefilter("ignore")
            library.disable_progress_bars()


@contextmanager
def explained(kind: Kind, repo: str, revision: str | None, field: str) -> Iterator[None]:
    """Turn the errors of huggingface_hub into HubError."""
    from huggingface_hub import constants, errors  # noqa: PLC0415

    ask_with_care()
    where = f"{field}: value {repo!r}"
    what = "model" if kind == "model" else "data set"
    try:
        yield
    except HubError:
        raise
    except errors.GatedRepoError:
        raise HubError(
            f"{where} is gated at {constants.ENDPOINT}; allowed: with HF_TOKEN in the environment, of an account that "
            "has been granted access"
        ) from None
    except errors.RepositoryNotFoundError:
        raise HubError(
            f"{where} is no path here, and {constants.ENDPOINT} shows no such {what}; a private one needs HF_TOKEN in "
            "the environment"
        ) from None
    except errors.RevisionNotFoundError:
        raise HubError(
            f"{field.rpartition('.')[0]}.revision: value {revision!r}; allowed: a branch, a tag or a commit of {repo}"
        ) from None
    except (errors.RevisionResolutionError, errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled):
        reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else f"{constants.ENDPOINT} cannot be reached"
        raise HubError(
            f"{where} is no path here, is not (or not whole) in the cache {constants.HF_HUB_CACHE}, and {reason}"
        ) from None
    except Exception as error:  # noqa: BLE001 - what a hub sends can raise anything in the library that reads it
        raise HubError(f"{where} cannot be read from {constants.ENDPOINT}: {one_line(error)}") from None


def _check_before_download(repo: str, commit: str, field: str) -> None:
    """Raise HubError before a download if the repository has no readable weights; offline there is no check."""
    import httpx2  # noqa: PLC0415
    import huggingface_hub  # noqa: PLC0415
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        names = huggingface_hub.HfApi().list_repo_files(repo, revision=commit)
    except (errors.OfflineModeIsEnabled, errors.HfHubHTTPError, httpx2.HTTPError):
        return
    _check_has_safetensors(names, repo, field)


def _check_has_safetensors(names: Sequence[str], repo: str, field: str) -> None:
    """Raise HubError if a repository has no safetensors file, whose weights alone may be read."""
    if any(map(_is_weights, names)):
        return
    pickles = sorted(name for name in names if name.endswith((".bin", ".pt", ".pth")))
    hint = f"; {pickles[0]} is a pickle, which is never read: convert it to safetensors" if pickles else ""
    raise HubError(f"{field}: value {repo!r} holds no .safetensors file{hint}")


@contextmanager
def _index_understood(repo: str, field: str) -> Iterator[None]:
    """Turn the errors of damaged index and weight files into HubError."""
    from huggingface_hub import errors  # noqa: PLC0415

    try:
        yield
    except (KeyError, AttributeError, TypeError, json.JSONDecodeError, errors.SafetensorsParsingError) as error:
        raise HubError(f"{field}: value {repo!r} has damaged weights: {one_line(error)}") from None


def _is_weights(name: str) -> bool:
    return name.endswith(".safetensors") and "/" not in name


def _check_files(folder: Path, field: str) -> None:
    for file in sorted(folder.iterdir()):
        if file.suffix in model_files.SUFFIXES | {".safetensors"}:
            _check_file(file, field)


def _check_file(file: Path, field: str) -> None:
    """Compare a file with the name of its blob: SHA-256 of a large file, Git's blob id of a small file."""
    if not file.is_symlink():
        return
    blob = file.resolve()
    if re.fullmatch(r"[0-9a-f]{64}", blob.name):
        digest: Any = hashlib.sha256()
    elif COMMIT.fullmatch(blob.name):
        digest = hashlib.sha1(b"blob %d\0" % blob.stat().st_size, usedforsecurity=False)
    else:
        return
    with blob.open("rb") as opened:
        while block := opened.read(_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != blob.name:
        raise HubError(f"{field}: {file.name} in the cache is damaged; delete {blob}, and it is downloaded again")


def one_line(error: Exception) -> str:
    """A library's error in at most 300 characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:300]
