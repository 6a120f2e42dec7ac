"""A workflow of your own around training: it trains, evaluates the weights, and hands the policy to a task of yours.

pyflyte run examples/train_and_deploy.py train_and_deploy --config examples/demo.yaml --count 2
"""

from pathlib import Path

from flytekit import task, workflow
from flytekit.types.directory import FlyteDirectory
from transformers import AutoConfig

from tasks.configuration.references import EvaluationOutcome, IterationOutcome
from workflows.config_input import Configuration
from workflows.count import Count
from workflows.evaluation import evaluation
from workflows.trained_policy import trained_policy


@task
def deploy(policy: FlyteDirectory, reports: list[IterationOutcome], evaluated: EvaluationOutcome) -> str:
    """Where your own deployment goes: the directory is downloaded when it is opened."""
    folder = Path(policy.download())
    kind = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False).model_type
    rewards = ", ".join(f"{each.reward:.3f}" for each in reports)
    passed = evaluated.metrics["val/pass@1"]
    return f"{kind} of weight version {evaluated.weight_version}, rewards {rewards}, pass@1 {passed:.3f}"


@workflow
def train_and_deploy(config: Configuration, count: Count = Count(1)) -> str:  # noqa: B008 - a number
    """Train for `count` iterations, evaluate the last weights, deploy them.

    Args:
        config: the run's configuration, a YAML or JSON file
        count: how many iterations to add
    """
    trained = trained_policy(config=config, count=count)
    evaluated = evaluation(config=config, version=trained.outcome.weight_version)
    told: str = deploy(policy=trained.policy, reports=trained.reports, evaluated=evaluated)
    return told
