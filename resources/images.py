"""Which container image a task runs in. Local runs use none.

By default every task runs in the image named at registration (`--image`, built from Dockerfile). A pool may name its
own (PoolConfig.image), for example one with vLLM for rollouts.
"""

import re

# [registry[:port]/]name[/name...] and :tag or @digest, as in the OCI distribution specification.
_REFERENCE = re.compile(
    r"(?:[A-Za-z0-9.-]+(?::[0-9]+)?/)?"
    r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*(?:/[a-z0-9]+(?:[._-]+[a-z0-9]+)*)*"
    r"(?::[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}|@sha256:[0-9a-f]{64})"
)


def checked_image(reference: str) -> str:
    """Return `reference`; raises ValueError unless it names a tag or digest, so that a run can be repeated."""
    if not _REFERENCE.fullmatch(reference):
        raise ValueError(f"image: value {reference!r}; allowed: registry/name:tag or registry/name@sha256:digest")
    return reference
