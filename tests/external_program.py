"""A program with a trainer of its own: each step's new weights depend on every token, log-prob and reward it got."""

import hashlib

import numpy as np

from storage.records import layout
from storage.stores.connect import connect
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import pull_version
from tasks.external.plans import OwnPlans
from tasks.external.rollouts import Rollouts
from tests.small_run import config, roll_out

# Placement "external", and nothing of a trainer of ours.
SECTIONS = {"trainer": {"placement": "external", "group_timeout_s": 5.0}, "optimizer": {"learning_rate": 1e-6}}


def settings(url, model, **sections):
    return config(url, model, **{**SECTIONS, **sections})


def process_dies():
    """Forget what a process knows, and the store does not, when it dies: who of it holds the lease."""
    OwnPlans._holders.clear()


def arrays(url, version):
    """A weight version as float32 arrays by name."""
    _, blocks = pull_version(connect(url), version, None, None)
    return {name: np.frombuffer(block.data, np.float32).reshape(block.shape) for name, block in blocks.items()}


def seen(groups):
    """What a trainer sees of groups, as comparable values."""
    return [
        (
            *(group.step, group.number, group.prompt, group.prompt_token_ids),
            [
                (
                    *(each.sample, each.token_ids.tolist(), each.logprobs.tolist(), each.weight_versions.tolist()),
                    *(each.completion, each.finish_reason, each.reward, each.rewards),
                )
                for each in group.responses
            ],
        )
        for group in groups
    ]


def trained(weights, groups):
    """The next weights: each tensor moves by a number that every value of the groups decides."""
    number = int(hashlib.sha256(repr(seen(groups)).encode()).hexdigest()[:8], 16)
    return {name: (array + np.float32(number % 97 - 48) * np.float32(1e-4)) for name, array in weights.items()}


def one_step(rollouts, step):
    """Take a step's groups, train and publish; returns what was seen."""
    groups = rollouts.next(step)
    roll_out(rollouts.url, step)
    taken = list(groups)
    rollouts.publish(trained(arrays(rollouts.url, step), taken), {"loss": 0.5})
    return seen(taken)


def advance(given, steps):
    """Go on from where the run stands to `steps`; returns what was seen by step."""
    with Rollouts(given) as rollouts:
        return {step: one_step(rollouts, step) for step in range(rollouts.step, steps)}


def versions(url):
    """The digests of each published version's tensors."""
    store, found = connect(url), {}
    for key in store.list(layout.WEIGHTS):
        if key.endswith("/manifest.json"):
            tensors = read_manifest(store, key.removesuffix("manifest.json")).tensors
            found[key] = {name: entry.digest for name, entry in tensors.items()}
    return found
