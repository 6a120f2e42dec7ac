"""Errors of reading a cluster: its Kubernetes API server, or Flyte's admin API."""


class NotReadable(Exception):  # noqa: N818 - reads as what happened
    """The cluster does not show an object: no right to read, no credentials, or an unknown kind of object."""


class NoAnswer(NotReadable):
    """The server cannot be reached, or does not answer in time."""
