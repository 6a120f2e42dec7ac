"""Reads objects from a Kubernetes API server, with a context of the user's kubeconfig. It never writes."""

import json
import os
from typing import Any

import yaml
from kubernetes import client, config
from urllib3.exceptions import HTTPError

from resources.cluster_errors import NoAnswer, NotReadable

_LIMIT_S = 15
# For a Secret: its name is needed, its content must not travel.
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1"


class KubernetesApi:
    """The API server of a context (None: the current one); raises NotReadable where there is no such context."""

    def __init__(self, context: str | None = None) -> None:
        # The library reads the variable only when it is imported.
        file = os.environ.get("KUBECONFIG") or None
        try:
            _, current = config.list_kube_config_contexts(file)
            self.context = context or current["name"]
            settings = client.Configuration()
            # Else each try that fails would be a line on stderr.
            settings.retries = 0
            self._client = config.new_client_from_config(file, context, False, settings)
        except (config.ConfigException, OSError, yaml.YAMLError, LookupError, TypeError) as error:
            raise NotReadable(f"no context of Kubernetes: {_one_line(error)}") from error
        self.server = str(self._client.configuration.host)

    def release(self) -> str:
        """Of the server; the first question to ask, which all may."""
        return str((self.get("/version") or {}).get("gitVersion", "of an unknown release"))

    def get(self, path: str, *, metadata_only: bool = False) -> dict[str, Any] | None:
        """The object or list at a path such as /api/v1/namespaces/x; None if there is none.

        Raises NotReadable: NoAnswer if nothing answers.
        """
        accepted = {"Accept": _METADATA if metadata_only else "application/json"}
        request = self._client.param_serialize("GET", path, header_params=accepted, auth_settings=["BearerToken"])
        try:
            response = self._client.call_api(*request, _request_timeout=_LIMIT_S)
            body = response.read()
        except (HTTPError, OSError, client.ApiException) as error:
            raise NoAnswer(f"{self.server} gives no answer ({type(error).__name__})") from error
        if response.status == 404:
            return None
        if response.status != 200:
            raise NotReadable(f"{self.server} says {response.status} to GET {path}")
        try:
            found = json.loads(body)
        except ValueError as error:
            raise NotReadable(f"{self.server} gives no JSON to GET {path}") from error
        if not isinstance(found, dict):
            raise NotReadable(f"{self.server} gives no object to GET {path}")
        return found

    def close(self) -> None:
        self._client.close()


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:200]
