"""The errors of a process that looks at a cluster and is not answered."""


class NotReadable(Exception):  # noqa: N818 - reads as what happened
    """A cluster does not show something: no right, no credentials, or it does not know the question."""


class NoAnswer(NotReadable):
    """Nothing answers at all."""
