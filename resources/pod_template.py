"""A pool's pod template, which builds its spec when it is first asked for: when Flyte serialises it.

So a container that only declares tasks does not load the Kubernetes client; none looks at the spec of its own pod.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from flytekit import PodTemplate

if TYPE_CHECKING:
    from kubernetes.client import V1PodSpec

PRIMARY = "primary"


class PoolPodTemplate(PodTemplate):  # type: ignore[misc]  # flytekit has no types for it
    """The grace period, placement and tolerations of a pool's pods, for which Flyte has no arguments."""

    def __init__(
        self, grace_s: int, node_selector: Mapping[str, str], tolerations: Sequence[Mapping[str, Any]]
    ) -> None:
        self._grace_s = grace_s
        self._node_selector = dict(node_selector)
        self._tolerations = [dict(toleration) for toleration in tolerations]
        self.primary_container_name = PRIMARY
        self.labels = self.annotations = None

    @cached_property
    def pod_spec(self) -> "V1PodSpec":
        from kubernetes.client import V1Container, V1PodSpec, V1Toleration  # noqa: PLC0415 - 0.2 s and 16 MB

        return V1PodSpec(
            containers=[V1Container(name=PRIMARY)],
            termination_grace_period_seconds=self._grace_s,
            node_selector=self._node_selector or None,
            tolerations=[V1Toleration(**toleration) for toleration in self._tolerations] or None,
        )
