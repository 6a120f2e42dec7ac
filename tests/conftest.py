"""Fixtures shared by all test packages."""

from collections.abc import Iterator

import pytest

from tests.s3_server import SerialisedMoto, moto_server

S3_BUCKET = "gleaner-test"
AWS_NAMES = (
    "AWS_ENDPOINT_URL_S3",
    "AWS_SESSION_TOKEN",
    "AWS_PROFILE",
    "AWS_REGION",
    "AWS_S3_ADDRESSING_STYLE",
    "FLYTE_AWS_ENDPOINT",
    "FLYTE_AWS_ACCESS_KEY_ID",
    "FLYTE_AWS_SECRET_ACCESS_KEY",
    "FLYTE_AWS_ADDRESSING_STYLE",
)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[SerialisedMoto]:
    """A running S3 server with one bucket; the environment points to it until the end of the session."""
    with moto_server() as (endpoint, application), pytest.MonkeyPatch.context() as environment:
        for name in AWS_NAMES:
            environment.delenv(name, raising=False)
        environment.setenv("AWS_ENDPOINT_URL", endpoint)
        environment.setenv("AWS_ACCESS_KEY_ID", "test")
        environment.setenv("AWS_SECRET_ACCESS_KEY", "a-secret-that-no-message-may-show")
        environment.setenv("AWS_DEFAULT_REGION", "us-east-1")
        environment.setenv("AWS_EC2_METADATA_DISABLED", "true")
        environment.setenv("AWS_SHARED_CREDENTIALS_FILE", "/nonexistent")
        environment.setenv("AWS_CONFIG_FILE", "/nonexistent")
        # Listings of a few keys then already have several pages.
        environment.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "50")
        _make_bucket(endpoint)
        yield application


@pytest.fixture(scope="session")
def s3_url(s3_server: SerialisedMoto) -> str:
    """URL of a bucket on a running S3 server. Tests add a prefix of their own."""
    return f"s3://{S3_BUCKET}"


def _make_bucket(endpoint: str) -> None:
    import boto3  # noqa: PLC0415 - comes with moto, and takes a second that few tests need

    client = boto3.client("s3", endpoint_url=endpoint)
    client.create_bucket(Bucket=S3_BUCKET)
    client.close()
