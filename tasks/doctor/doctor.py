"""The command `gleaner doctor`: lists the equipment of this machine or a cluster, with problems."""

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import click

from storage.records.fitness import Finding
from tasks.doctor.cluster import ClusterTarget, Unread
from tasks.reporting.config_argument import GivenConfig, config_argument
from tasks.reporting.progress import progress


@click.command(short_help="Examine this machine: GPUs, driver, memory, kernels. Or a cluster.")
@config_argument(required=False)
@click.option("--gpus", type=click.IntRange(min=0), help="How many GPUs it should have. Default: as many as it has.")
@click.option(
    "--cluster",
    "flyte_config",
    type=click.Path(path_type=Path, exists=True, dir_okay=False),
    help="Examine the cluster of this Flyte configuration file instead.",
)
@click.option("--project", default="flytesnacks", show_default=True, help="Of Flyte, with --cluster.")
@click.option("--domain", default="development", show_default=True, help="Of Flyte, with --cluster.")
@click.option("--namespace", help="Of the run's pods, with --cluster. Default: <project>-<domain>.")
@click.option("--flyte-namespace", default="flyte", show_default=True, help="Of Flyte itself, with --cluster.")
@click.option("--kube-context", help="A context of your kubeconfig, with --cluster. Default: the current one.")
def doctor(
    config: GivenConfig | None,
    gpus: int | None,
    flyte_config: Path | None,
    project: str,
    domain: str,
    namespace: str | None,
    flyte_namespace: str,
    kube_context: str | None,
) -> None:
    """Examine this machine in less than a minute, or with --cluster a cluster; exits with 1 if something is wrong.

    With --cluster, CONFIG is the configuration of the run that the cluster shall hold. Without CONFIG, the default
    pools are examined, and no store is tested.
    """
    if flyte_config is None:
        if config is not None:
            raise ValueError(f"doctor: value {str(config)!r}; allowed: CONFIG with --cluster")
        from tasks.doctor.examination import examine  # noqa: PLC0415 - it imports torch: seconds

        tell(examine(gpus))
        return
    if gpus is not None:
        raise ValueError("doctor: --gpus and --cluster given; allowed: one of them")
    from tasks.doctor.cluster_examination import examine_cluster  # noqa: PLC0415 - it imports flytekit: a second

    pods = namespace or f"{project}-{domain}"
    place = ClusterTarget(project=project, domain=domain, namespace=pods, flyte_namespace=flyte_namespace)
    settings = None if config is None else config.load()
    tell(examine_cluster(flyte_config, settings, place, kube_context))


def tell(findings: Iterable[Finding]) -> NoReturn:
    """Print each finding as soon as known, and a verdict at the end; exits with 1 after a wrong finding."""
    wrong = unread = 0
    with progress() as shown:
        shown.tell("examining")
        for finding in findings:
            shown.say(line_of(finding))
            wrong += finding.lack is not None
            unread += isinstance(finding, Unread)
    unseen = f"; not readable: {unread}" if unread else ""
    click.echo(f"wrong: {wrong} of these{unseen}" if wrong else f"nothing {'read ' if unread else ''}is wrong{unseen}")
    sys.exit(int(wrong > 0))


def line_of(finding: Finding) -> str:
    """A finding in one line."""
    return f"{finding.name}: {finding.shown}" if finding.lack is None else f"{finding.name}: WRONG: {finding.lack}"
