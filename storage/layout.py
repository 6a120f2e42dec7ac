"""The only place that joins keys. Numbers are zero-padded: key order is numeric order (docs/format.md section 2)."""

RUN = "run.json"
# Derived from the reports for people and their tools; nothing of Gleaner reads it.
METRICS = "metrics.jsonl"
MODEL = "model/"
WEIGHTS = "weights/"
CHECKPOINTS = "checkpoints/"
ITERATIONS = "iterations/"
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


def report(index: int) -> str:
    return f"{iteration(index)}report.json"


def lease(epoch: int) -> str:
    return f"{LEASE}{epoch:06d}.json"


def deck(index: int) -> str:
    """The iteration's Deck as one page, for those who have no Flyte console at hand."""
    return f"{iteration(index)}deck.html"
