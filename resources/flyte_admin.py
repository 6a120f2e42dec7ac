"""Reads from Flyte's admin API: release, domains, registered versions and resource limits of a project.

Requests use the client and the credentials of `pyflyte`. Judging the answers is left to the callers.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flyteidl.admin.common_pb2 import NamedEntityIdentifier, ResourceListRequest, Sort
from flyteidl.admin.launch_plan_pb2 import ActiveLaunchPlanListRequest
from flyteidl.admin.matchable_resource_pb2 import TASK_RESOURCE, ListMatchableAttributesRequest
from flyteidl.admin.project_pb2 import ProjectListRequest
from flyteidl.admin.version_pb2 import GetVersionRequest
from flytekit.clients.raw import RawSynchronousFlyteClient
from flytekit.configuration import Config
from flytekit.core.context_manager import FlyteContextManager
from flytekit.core.type_engine import TypeEngine
from flytekit.exceptions.base import FlyteException
from flytekit.models.literals import Literal

from resources.cluster_errors import NoAnswer, NotReadable
from resources.labels import SETTINGS_ANNOTATION

# Flyte's names of the resources, which a limit may leave out.
RESOURCES = ("cpu", "memory", "gpu")
_LISTED_MAX = 1000


@dataclass(frozen=True, kw_only=True)
class ActivePlan:
    """A launch plan whose schedule is on.

    Attributes:
        settings_digest: digest of its settings; empty if the plan states none.
        inputs: the inputs that the plan fixes.
    """

    name: str
    version: str
    schedule: str
    settings_digest: str
    inputs: dict[str, Any]


@dataclass(frozen=True)
class Registered:
    """The versions of a workflow: their number (counted up to 1,000), and the newest."""

    count: int
    newest: str


class FlyteAdmin(RawSynchronousFlyteClient):  # type: ignore[misc]  # flytekit has no types for it
    """The admin API that a configuration file of Flyte names, or the FLYTE_* variables before it.

    All methods raise NotReadable: NoAnswer if nothing answers.
    """

    def __init__(self, config_file: Path) -> None:
        platform = Config.auto(str(config_file)).platform
        self.endpoint = str(platform.endpoint)
        super().__init__(platform)

    def release(self) -> str:
        version = self._asked(lambda: self._stub.GetVersion(GetVersionRequest(), metadata=self._metadata))
        return str(version.control_plane_version.Version)

    def domains(self) -> dict[str, list[str]]:
        """The domains of each project."""
        listed = self._asked(lambda: self.list_projects(ProjectListRequest(limit=_LISTED_MAX)))
        return {project.id: [domain.id for domain in project.domains] for project in listed.projects}

    def registered(self, project: str, domain: str, workflow: str) -> Registered | None:
        """The versions of a workflow; None if it is not registered."""
        request = ResourceListRequest(
            id=NamedEntityIdentifier(project=project, domain=domain, name=workflow),
            limit=_LISTED_MAX,
            sort_by=Sort(key="created_at", direction=Sort.DESCENDING),
        )
        found = self._asked(lambda: self.list_workflows_paginated(request)).workflows
        return Registered(len(found), found[0].id.version) if found else None

    def active_plans(self, project: str, domain: str, workflow: str) -> list[ActivePlan]:
        """The launch plans of a workflow whose cron schedules are on (of the project's first 1,000 that are active)."""
        request = ActiveLaunchPlanListRequest(project=project, domain=domain, limit=_LISTED_MAX)
        listed = self._asked(lambda: self.list_active_launch_plans_paginated(request)).launch_plans
        return [
            ActivePlan(
                name=plan.id.name,
                version=plan.id.version,
                schedule=plan.spec.entity_metadata.schedule.cron_schedule.schedule,
                settings_digest=plan.spec.annotations.values.get(SETTINGS_ANNOTATION, ""),
                inputs={"config": _value(inputs["config"], dict), "count": _value(inputs["count"], int)},
            )
            for plan in sorted(listed, key=lambda plan: str(plan.id.name))
            if plan.spec.workflow_id.name == workflow and plan.spec.entity_metadata.schedule.cron_schedule.schedule
            for inputs in [_inputs(plan.spec)]
            if {"config", "count"} <= inputs.keys()
        ]

    def limits(self, project: str, domain: str, workflow: str) -> dict[str, str] | None:
        """The limits by resource that are set for the workflow, the domain or the project, the narrowest of these.

        None: limits come from flyteadmin's own configuration, which this API does not show.
        """
        request = ListMatchableAttributesRequest(resource_type=TASK_RESOURCE)
        rows = self._asked(lambda: self.list_matchable_attributes(request)).configurations
        wanted = {"project": project, "domain": domain, "workflow": workflow, "launch_plan": ""}

        def width(row: Any) -> int:
            return sum(not getattr(row, name) for name in wanted)

        fitting = [row for row in rows if all(getattr(row, name) in ("", value) for name, value in wanted.items())]
        if not fitting:
            return None
        limits = min(fitting, key=width).attributes.task_resource_attributes.limits
        return {name: getattr(limits, name) for name in RESOURCES if getattr(limits, name)}

    def _asked(self, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except FlyteException as error:
            cause = error.__cause__
            code = cause.code().name if cause is not None and hasattr(cause, "code") else type(error).__name__
            kind = NoAnswer if code in ("UNAVAILABLE", "DEADLINE_EXCEEDED") else NotReadable
            raise kind(f"{self.endpoint} says {code}") from error


def _inputs(spec: Any) -> dict[str, Any]:
    """The literals of an execution that a launch plan's schedule starts."""
    given = {name: each.default for name, each in spec.default_inputs.parameters.items() if each.HasField("default")}
    return {**given, **spec.fixed_inputs.literals}


def _value(literal: Any, kind: type) -> Any:
    """What a literal of Flyte's stands for."""
    return TypeEngine.to_python_value(FlyteContextManager.current_context(), Literal.from_flyte_idl(literal), kind)
