"""Which texts are secrets, by their shape or by the name in front: one rule for every place that keeps texts.

A run keeps and shows its configuration, and so does a fleet; neither is a place for a password. Nothing here repeats
the examined text.
"""

import os
import re
from collections.abc import Iterable, Iterator

_STARS = "***"
KNOWN_LENGTH_MIN = 8
# Of a text that is searched for secrets: one of an error may hold anything.
LENGTH_MAX = 1 << 16
# Tokens whose issuers begin them with a mark, so that such rules find them.
_MARKED = {
    "an access key of AWS": r"(?:AKIA|ASIA)[0-9A-Z]{16}(?![0-9A-Za-z])",
    "a token of Hugging Face": r"hf_(?:[A-Za-z0-9]{30,}|(?=[a-z]*[A-Z0-9])[A-Za-z0-9]{16,})(?![A-Za-z0-9_])",
    "a token of GitHub": r"gh[opsru]_[A-Za-z0-9]{16,}|github_pat_[A-Za-z0-9_]{20,}",
    "a token of GitLab": r"gl[a-z]{2,4}-[A-Za-z0-9_-]{18,}",
    "a token of Slack": r"xox[abeoprs]-[A-Za-z0-9-]{10,}",
    "a key of Google": r"AIza[A-Za-z0-9_-]{30,}|GOCSPX-[A-Za-z0-9_-]{20,}",
    "a key of an API": (
        r"sk[-_](?:[A-Za-z0-9]{1,12}[-_]){0,3}(?:[A-Za-z0-9]{30,}|(?=[A-Za-z]*[0-9])[A-Za-z0-9]{16,})"
        r"|[rp]k_(?:live|test)_[A-Za-z0-9]{16,}|nvapi-[A-Za-z0-9_-]{20,}|(?:gsk|r8|npm|dop_v1)_[A-Za-z0-9]{30,}"
        r"|xai-[A-Za-z0-9]{30,}|pypi-[A-Za-z0-9_-]{50,}"
    ),
    "a signed token": r"eyJ[A-Za-z0-9_-]{8,999}\.eyJ[A-Za-z0-9_-]{8,}\.[A-Za-z0-9_-]{8,}",
    "a key of Azure": r"(?i:AccountKey|SharedAccessKey|SharedAccessSignature)=[A-Za-z0-9+/=%&_-]{16,}",
    "the value of an Authorization header": r"(?i:bearer|basic) [A-Za-z0-9._~+/-]{16,}={0,2}(?![A-Za-z0-9 ])",
    "a webhook of Slack": r"hooks\.slack\.com/services/\S+",
    "a private key": r"-----BEGIN [A-Z ]*PRIVATE KEY(?s:.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z))",
}
_SHAPES = {what: re.compile(f"(?<![A-Za-z0-9])(?:{pattern})") for what, pattern in _MARKED.items()}
_USER_INFO = re.compile(r"://[^/\s:]*+:(?P<value>[^/\s]+)@")
_QUERY = re.compile(r"[?&;](?P<name>[^=&?;\s]+)=(?P<value>[^&;\s]+)")
# A name and its value as errors and programs write them: DB_PASS=..., "api_key": "...".
_NAME = re.compile(r"(?<![\w-])[\w-]++(?=[\"']?\s?[=:])")
_VALUE = re.compile(r"[\"']?\s?[=:]\s?[\"']?(?P<value>[^\s\"',;&)}\]]{4,})")
_SIGNATURES = re.compile(r"(?:x-(?:amz|goog)-)?(?:signature|credential)|sig|(?:x-amz-)?security-token", re.IGNORECASE)
# What stands for a secret that comes from elsewhere, or says that there is none.
_NO_SECRET = re.compile(
    r"|\$\([^()]+\)|\$\{[^{}]+\}|\?{3}|\*+|<[^<>]*>|\[[^\[\]]*\]|(?i:true|false|yes|no|on|off|null|none)|\d{1,3}"
)
_PATH = re.compile(r"(?:~|\.{1,2})?/[\w.-]+(?:/[\w.-]+)+/?|(?:[\w-]+/)+[\w-]+\.[a-z]{2,5}")
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
# Words before "key" that make it one that opens something.
_KEYS = re.compile(
    "access|account|admin|anthropic|api|auth|client|deploy|encryption|google|hf|license|master|openai|private|root"
    "|secret|service|signing|ssh|storage|subscription|wandb"
)
# Words before "token" and "pass" in names of a language model's own tokens, and of times that something is done.
_TOKENS_OF_TEXT = re.compile(
    "answer|assistant|audio|begin|bos|cls|end|eos|first|image|last|mask|new|newline|next|no|pad|padding|per|prefix|sep"
    "|separator|space|special|start|stop|suffix|system|think|tool|unk|user|video"
)
_PASSES = re.compile("backward|dry|each|every|first|forward|last|max|min|multi|n|no|num|one|per|second|single|")
_ALONE = re.compile(
    "[a-z]*(?:apikey|passphrase|passwd|password|secret)|authorization|credential|(?:db|pg|ssh|user)pass"
)


def secret_in(value: str, name: str = "") -> str | None:
    """What kind of secret the text is or holds, in words that do not repeat it; None: it is none.

    name: of the variable or the field that it is given for.
    """
    for found in _USER_INFO.finditer(value):
        if not _NO_SECRET.fullmatch(found["value"]):
            return "a url with a password"
    if "://" in value:
        for found in _QUERY.finditer(value):
            if _says_secret(found["name"]):
                return "a url with a secret among its parameters"
    for what, shape in _SHAPES.items():
        if shape.search(value):
            return what
    if names_secret(name) and not _NO_SECRET.fullmatch(value) and not _PATH.fullmatch(value):
        return "a text whose name says that it is secret"
    return None


def without_secrets(text: str, known: Iterable[str] = ()) -> str:
    """The text with "***" in the place of each secret in it, known by its shape, its name, or its value.

    Only the first LENGTH_MAX characters are returned. known: secret values, such as values of variables; short values
    are left, because they may be words.
    """
    text = text[:LENGTH_MAX]
    for value in sorted({*known}, key=len, reverse=True):
        if len(value) >= KNOWN_LENGTH_MIN and not _NO_SECRET.fullmatch(value):
            text = text.replace(value, _STARS)
    for shape in _SHAPES.values():
        text = shape.sub(_STARS, text)
    for spans in (_passwords, _signatures, _named_values):
        shown, at = [], 0
        for start, end in spans(text):
            shown += [text[at:start], _STARS]
            at = end
        text = "".join([*shown, text[at:]])
    return text


def _passwords(text: str) -> Iterator[tuple[int, int]]:
    """Where those of urls begin and end."""
    return (found.span("value") for found in _USER_INFO.finditer(text))


def _signatures(text: str) -> Iterator[tuple[int, int]]:
    """The same of secret parameters of urls."""
    return (found.span("value") for found in _QUERY.finditer(text) if _says_secret(found["name"]))


def _named_values(text: str) -> Iterator[tuple[int, int]]:
    """Places of values whose names say "secret". Each value is read once, for any number of names in it."""
    at = 0
    for name in _NAME.finditer(text):
        if name.end() >= at and _says_secret(name[0]) and (found := _VALUE.match(text, name.end())):
            at = found.end()
            yield found.span("value")


def _says_secret(name: str) -> bool:
    """True if the name, also of a url's parameter, says that its value is secret."""
    return names_secret(name) or _SIGNATURES.fullmatch(name) is not None


def environment_secrets() -> list[str]:
    """The values of this process's environment variables with names that stand for secrets."""
    return [value for name, value in os.environ.items() if names_secret(name)]


def names_secret(name: str) -> bool:
    """Whether the name of a variable or a field says that its value is secret."""
    words = [word.lower() for word in _WORDS.findall(name)]
    before, last = ["", "", *words][-2:]
    match last:
        case "token":
            return _TOKENS_OF_TEXT.fullmatch(before) is None
        case "pass":
            return len(words) == 1 or _PASSES.fullmatch(before) is None
        case "pwd":
            return before not in ("", "old")
        case "key" | "keys":
            return _KEYS.fullmatch(before) is not None
    return _ALONE.fullmatch(last) is not None or _ALONE.fullmatch(last.removesuffix("s")) is not None
