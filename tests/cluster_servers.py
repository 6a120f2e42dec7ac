"""A Flyte admin server and a Kubernetes API server for tests, both on the loopback, with the answers of real ones.

The first is flyteidl's own gRPC service with real messages; the second answers paths with objects, and with the Status
that an API server gives where there is no object or no right.
"""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import grpc
import yaml
from flyteidl.admin import launch_plan_pb2, matchable_resource_pb2, project_pb2, version_pb2, workflow_pb2
from flyteidl.service.admin_pb2_grpc import AdminServiceServicer, add_AdminServiceServicer_to_server

TOKEN = "a-token-that-no-message-may-show"


class TestAdmin(AdminServiceServicer):
    """One project with two domains; `denied` names the methods that answer PERMISSION_DENIED."""

    __test__ = False

    def __init__(self) -> None:
        self.denied: set[str] = set()
        self.versions: dict[str, list[str]] = {"workflows.training.training": ["8", "7"]}
        self.limits: list[dict[str, Any]] = []
        # As flytekit serialises them; all of them are active.
        self.plans: list[launch_plan_pb2.LaunchPlan] = []

    def _allow(self, context: grpc.ServicerContext, method: str) -> None:
        if method in self.denied:
            context.abort(grpc.StatusCode.PERMISSION_DENIED, "not yours to see")

    def GetVersion(self, request, context):  # noqa: N802 - gRPC's names
        self._allow(context, "GetVersion")
        return version_pb2.GetVersionResponse(control_plane_version=version_pb2.Version(Version="v1.16.8"))

    def ListProjects(self, request, context):  # noqa: N802
        self._allow(context, "ListProjects")
        domains = [project_pb2.Domain(id=name, name=name) for name in ("development", "production")]
        return project_pb2.Projects(projects=[project_pb2.Project(id="gleaner", name="gleaner", domains=domains)])

    def ListWorkflows(self, request, context):  # noqa: N802
        self._allow(context, "ListWorkflows")
        assert (request.sort_by.key, request.sort_by.direction) == ("created_at", 0)
        found = workflow_pb2.WorkflowList()
        if (request.id.project, request.id.domain) == ("gleaner", "development"):
            for version in self.versions.get(request.id.name, []):
                found.workflows.add().id.version = version
        return found

    def ListActiveLaunchPlans(self, request, context):  # noqa: N802
        self._allow(context, "ListActiveLaunchPlans")
        found = launch_plan_pb2.LaunchPlanList()
        if (request.project, request.domain) == ("gleaner", "development"):
            found.launch_plans.extend(self.plans)
        return found

    def ListMatchableAttributes(self, request, context):  # noqa: N802
        self._allow(context, "ListMatchableAttributes")
        assert request.resource_type == matchable_resource_pb2.TASK_RESOURCE
        found = matchable_resource_pb2.ListMatchableAttributesResponse()
        for row in self.limits:
            spec = matchable_resource_pb2.TaskResourceSpec(**row["limits"])
            attributes = matchable_resource_pb2.TaskResourceAttributes(limits=spec)
            found.configurations.add(
                attributes=matchable_resource_pb2.MatchingAttributes(task_resource_attributes=attributes),
                **{name: row.get(name, "") for name in ("project", "domain", "workflow", "launch_plan")},
            )
        return found


@contextmanager
def admin_server(folder: Path, admin: TestAdmin) -> Iterator[Path]:
    """The configuration file that leads `pyflyte` to a running admin server."""
    server = grpc.server(ThreadPoolExecutor(4))
    add_AdminServiceServicer_to_server(admin, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield flyte_config(folder, port)
    finally:
        server.stop(0).wait()


def flyte_config(folder: Path, port: int) -> Path:
    # flytekit remembers what was in a file of this name.
    file = folder / f"flyte-{port}.config"
    file.write_text(f"[platform]\nurl=127.0.0.1:{port}\ninsecure=True\n", encoding="utf-8")
    return file


class ApiAnswers:
    """Objects by path, paths that are forbidden, and the paths and kinds that were asked for."""

    def __init__(self) -> None:
        self.objects: dict[str, dict[str, Any]] = {}
        self.forbidden: set[str] = set()
        self.seen: list[tuple[str, str]] = []

    def to(self, path: str, authorization: str | None) -> tuple[int, dict[str, Any]]:
        if authorization != f"Bearer {TOKEN}":
            return 401, status(401, "Unauthorized", "Unauthorized")
        if path in self.forbidden:
            return 403, status(403, "Forbidden", f'User "test" cannot get {path}')
        if path not in self.objects:
            return 404, status(404, "NotFound", f"{path} not found")
        return 200, self.objects[path]


def status(code: int, reason: str, message: str) -> dict[str, Any]:
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": message,
        "reason": reason,
        "code": code,
    }


@contextmanager
def api_server(folder: Path, answers: ApiAnswers) -> Iterator[Path]:
    """The kubeconfig of a running API server."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answers.seen.append((self.path, self.headers["Accept"]))
            code, found = answers.to(self.path, self.headers["Authorization"])
            body = json.dumps(found).encode()
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield kubeconfig(folder, server.server_port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def kubeconfig(folder: Path, port: int) -> Path:
    file = folder / "kubeconfig"
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "contexts": [{"name": "test", "context": {"cluster": "here", "user": "me"}}],
        "clusters": [{"name": "here", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "users": [{"name": "me", "user": {"token": TOKEN}}],
    }
    file.write_text(yaml.safe_dump(document), encoding="utf-8")
    return file
