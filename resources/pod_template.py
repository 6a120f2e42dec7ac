"""A pool's pod template, which builds its spec only when Flyte serialises a task.

A container that only declares tasks does not load the Kubernetes client, because no container reads the spec of its own
pod.
"""

import base64
import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flytekit import PodTemplate

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec

PRIMARY = "primary"
# How Flyte's webhook is asked for secrets: flyteplugins/go/tasks/pluginmachinery/utils/secrets of Flyte 1.16.8.
_INJECT = {"inject-flyte-secrets": "true"}
_ASKED_IN = "flyte.secrets/s"
_TO_FLYTES_BASE_32 = bytes.maketrans(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ234567", b"abcdefghijklmnopqrstuvwxyz123456")


class PoolPodTemplate(PodTemplate):  # type: ignore[misc]  # flytekit has no types for it
    """What a pool's pods are, for which Flyte has no arguments.

    labels, annotations: of the pod; null is the empty text. pod, container: arguments of the Kubernetes client's
    V1PodSpec and V1Container, with values in the words of Kubernetes; those that are empty are left out.
    """

    def __init__(
        self,
        *,
        labels: Mapping[str, str | None],
        annotations: Mapping[str, str | None],
        pod: Mapping[str, Any],
        container: Mapping[str, Any],
    ) -> None:
        self._pod = {name: value for name, value in pod.items() if value}
        self._container = {name: value for name, value in container.items() if value}
        self.primary_container_name = PRIMARY
        # Flyte takes None for none.
        self.labels = {name: text or "" for name, text in labels.items()} or None
        self.annotations = {name: text or "" for name, text in annotations.items()} or None

    @cached_property
    def pod_spec(self) -> "V1PodSpec":
        from kubernetes.client import V1Container, V1PodSpec  # noqa: PLC0415 - 0.2 s and 16 MB

        # With this policy Kubernetes gives the end of the log as the message of a container that wrote none.
        primary = V1Container(name=PRIMARY, termination_message_policy="FallbackToLogsOnError", **self._container)
        return V1PodSpec(containers=[primary], **self._pod)


def secret_requests(secrets: Sequence[Mapping[str, str]]) -> tuple[dict[str, str], dict[str, str]]:
    """The labels and annotations of a pod that ask Flyte for secrets as environment variables.

    Flyte has no argument for the secrets of a node, only for the secrets of a task. The result is what Flyte makes of a
    task's secrets: protobuf text of the message flyteidl.core.Secret, in base 32 with Flyte's letters.
    """
    annotations = {}
    for index, secret in enumerate(secrets):
        texts = " ".join(f"{name}: {json.dumps(secret[name])}" for name in ("group", "key", "env_var"))
        encoded = base64.b32encode(f"{texts} mount_requirement: ENV_VAR".encode()).rstrip(b"=")
        annotations[f"{_ASKED_IN}{index}"] = encoded.translate(_TO_FLYTES_BASE_32).decode()
    return (_INJECT if annotations else {}), annotations
