"""The only place that joins keys. Numbers are zero-padded: key order is numeric order (docs/format.md section 2)."""

import re

RUN = "run.json"
# Derived from the reports for people and their tools; nothing of Gleaner reads it.
METRICS = "metrics.jsonl"
MODEL = "model/"
WEIGHTS = "weights/"
CHECKPOINTS = "checkpoints/"
REWARD_MODELS = "reward_models/"
ITERATIONS = "iterations/"
EVALUATIONS = "evaluations/"
LENGTHS = "lengths/"
FORECASTS = "forecasts/"
LEASE = "lease/"
LEASE_BEAT = "lease/beat.json"
PROBE = "probe/"


def model_file(name: str) -> str:
    return f"{MODEL}{name}"


def weights(version: int) -> str:
    """Prefix of one weight version."""
    return f"{WEIGHTS}{version:08d}/"


def checkpoint(version: int) -> str:
    """Prefix of the trainer's state after `version` optimizer steps."""
    return f"{CHECKPOINTS}{version:08d}/"


def critic_checkpoint(version: int) -> str:
    """Prefix of the critic's state, of runs that have one; complete before the checkpoint it belongs to."""
    return f"{checkpoint(version)}critic/"


def manifest(prefix: str) -> str:
    """The object that completes a set of tensors; written last."""
    return f"{prefix}manifest.json"


def delta_manifest(prefix: str) -> str:
    """A weight version that is stored whole, as differences to the one before it; written before its manifest."""
    return f"{prefix}delta.json"


def tensor_object(prefix: str, name: str) -> str:
    return f"{prefix}{name}.safetensors"


def iteration(index: int) -> str:
    return f"{ITERATIONS}{index:06d}/"


def plan(index: int) -> str:
    return f"{iteration(index)}plan.json"


def prompts(index: int, digest: str) -> str:
    """Content-named, so that a planner that died and its successor never mix."""
    return f"{iteration(index)}prompts-{digest}.arrow"


def settings(index: int) -> str:
    """The configuration in force now; overwritten by every execution that works on the iteration."""
    return f"{iteration(index)}settings.json"


def claims(index: int) -> str:
    return f"{iteration(index)}claims/"


def claim(index: int, unit: int, epoch: int) -> str:
    return f"{claims(index)}{unit:05d}/{epoch:06d}.json"


def claim_address(key: str) -> tuple[int, int]:
    """(unit, epoch) of a claim's key."""
    unit, epoch = key.rsplit("/", 2)[1:]
    return int(unit), int(epoch.removesuffix(".json"))


def shard(index: int, incarnation: str, sequence: int) -> str:
    return f"{iteration(index)}journal/{incarnation}/{sequence:08d}.arrow"


def journal(index: int) -> str:
    return f"{iteration(index)}journal/"


def alive(index: int, incarnation: str) -> str:
    return f"{iteration(index)}alive/{incarnation}.json"


def alive_all(index: int) -> str:
    return f"{iteration(index)}alive/"


def ended(index: int, execution_digest: str) -> str:
    """Below it, the rollout maps of an execution that have ended, by pool."""
    return f"{iteration(index)}ended/{execution_digest}/"


def failures(index: int, execution_digest: str) -> str:
    """Below it, why attempts of slots failed in an execution; for people."""
    return f"{iteration(index)}failures/{execution_digest}/"


def batch(index: int, number: int) -> str:
    return f"{iteration(index)}batches/{number:06d}.json"


def batches(index: int) -> str:
    return f"{iteration(index)}batches/"


def closed(index: int) -> str:
    """The mark that no token of this iteration will be used any more; never deleted."""
    return f"{iteration(index)}closed.json"


def responses(index: int) -> str:
    """All responses of a committed iteration in one object, which stands for its journal."""
    return f"{iteration(index)}responses.arrow"


def training(index: int) -> str:
    """What the trainer measured in this iteration; written before its weights are published."""
    return f"{iteration(index)}training.json"


def nonfinite(index: int) -> str:
    """Why the last attempt to train this iteration stopped; overwritten by the next one that does."""
    return f"{iteration(index)}nonfinite.json"


def report(index: int) -> str:
    return f"{iteration(index)}report.json"


def lengths(index: int) -> str:
    """What the run has learned about lengths up to this iteration; a help to planning, which does without."""
    return f"{LENGTHS}{index:06d}.safetensors"


def lengths_iteration(key: str) -> int | None:
    """The iteration of a key below LENGTHS; None when it is no such table's."""
    match = re.fullmatch(rf"{LENGTHS}(\d{{6,}})\.safetensors", key)
    return int(match[1]) if match else None


def forecast(digest: str) -> str:
    """What a forecast said of the run; the digest (hexadecimal) is of the bytes."""
    return f"{FORECASTS}{digest}.json"


def lease(epoch: int) -> str:
    return f"{LEASE}{epoch:06d}.json"


def deck(index: int) -> str:
    """The iteration's Deck as one page, for those who have no Flyte console at hand."""
    return f"{iteration(index)}deck.html"


def evaluation_name(version: int, settings_digest: str) -> str:
    """An evaluation of one weight version; the digest (hexadecimal) names its settings."""
    return f"{version:08d}-{settings_digest}"


def evaluation(name: str) -> str:
    """The record of an evaluation that has ended; what it was made from lies at `evaluation_url`."""
    return f"{EVALUATIONS}{name}.json"


def evaluation_deck(name: str) -> str:
    return f"{EVALUATIONS}{name}.html"


def evaluation_url(run_url: str, name: str) -> str:
    """Where an evaluation's own directory is: one iteration, laid out as a run's, without training."""
    return f"{run_url.rstrip('/')}/{EVALUATIONS}{name}"


def evaluated(url: str) -> tuple[str, str]:
    """(url of the run, name of the evaluation) of an evaluation's url; raises ValueError when it is none."""
    match = re.fullmatch(rf"(.+)/{EVALUATIONS}(\d{{8}}-[0-9a-f]+)", url.rstrip("/"))
    if match is None:
        raise ValueError(f"evaluation: url {url!r}; allowed: <run>/{EVALUATIONS}<version>-<digest>")
    return match[1], match[2]


def reward_model(name: str) -> str:
    """What the reward model of this name consists of; written after its chunks."""
    return f"{REWARD_MODELS}{name}.json"


def reward_model_chunk(digest: str) -> str:
    """A piece of a file, named by its content; models of several names may share it."""
    return f"{REWARD_MODELS}chunks/{digest}"
