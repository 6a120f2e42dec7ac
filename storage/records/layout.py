"""The only place that joins keys. Numbers are zero-padded: key order is numeric order (docs/format.md section 2).

Each function returns a key, or a prefix of keys that ends with "/".
"""

import re

RUN = "run.json"
# Derived from the reports for people and their tools; no part of Gleaner reads it.
METRICS = "metrics.jsonl"
MODEL = "model/"
WEIGHTS = "weights/"
CHECKPOINTS = "checkpoints/"
REWARD_MODELS = "reward_models/"
TEACHERS = "teachers/"
SOURCES = "sources/"
ITERATIONS = "iterations/"
SETTINGS = "settings/"
EVALUATIONS = "evaluations/"
LENGTHS = "lengths/"
FORECASTS = "forecasts/"
KNOWN = "known/"
GRADINGS = "gradings/"
FAILURES = "failures/"
REQUESTS = "requests/"
# The fleet of a run whose own trainer stands, with the keys of storage/fleet/fleet_layout.py.
STANDING = "standing/"
LEASE = "lease/"
LEASE_BEAT = "lease/beat.json"
PROBE = "probe/"
# The sign of life of a program that trains outside a Flyte execution.
EXTERNAL_BEAT = "external/beat.json"
# More of a sign of life is never read, whatever lies at its key.
BEAT_BYTES_MAX = 1024


def model_file(name: str) -> str:
    """A small file of the model: configuration, tokenizer or chat template."""
    return f"{MODEL}{name}"


def source_rows(digest: str) -> str:
    """Rows of a data set of the hub, named by their content."""
    return f"{SOURCES}{digest}.parquet"


def weights(version: int) -> str:
    """Prefix of one weight version."""
    return f"{WEIGHTS}{version:08d}/"


def checkpoint(version: int) -> str:
    """Prefix of the trainer's state after `version` optimizer steps."""
    return f"{CHECKPOINTS}{version:08d}/"


def critic_checkpoint(version: int) -> str:
    """Prefix of the critic's state, in runs that have a critic; complete before the checkpoint it belongs to."""
    return f"{checkpoint(version)}critic/"


def manifest(prefix: str) -> str:
    """The object that completes a set of tensors, written last."""
    return f"{prefix}manifest.json"


def delta_manifest(prefix: str) -> str:
    """Beside a version that is stored whole: its differences from the one before; written before its manifest."""
    return f"{prefix}delta.json"


def tensor_object(prefix: str, name: str) -> str:
    """A safetensors object of a set of tensors, named by its content."""
    return f"{prefix}{name}.safetensors"


def iteration(index: int) -> str:
    """Prefix of one iteration."""
    return f"{ITERATIONS}{index:06d}/"


def plan(index: int) -> str:
    """The plan of an iteration."""
    return f"{iteration(index)}plan.json"


def prompts(index: int, digest: str) -> str:
    """The prompts of an iteration, named by content: tables of a dead planner and of its successor never mix."""
    return f"{iteration(index)}prompts-{digest}.arrow"


def settings(index: int) -> str:
    """The settings of the execution that works on an iteration; the next execution overwrites them.

    The key lies outside the iteration, because machines that join a run write below `iterations/`.
    """
    return f"{SETTINGS}{index:06d}.json"


def claims(index: int) -> str:
    """Prefix of an iteration's claims."""
    return f"{iteration(index)}claims/"


def claim(index: int, unit: int, epoch: int) -> str:
    """A claim: entry `epoch` in the log of a unit."""
    return f"{claims(index)}{unit:05d}/{epoch:06d}.json"


def claim_address(key: str) -> tuple[int, int] | None:
    """Returns the (unit, epoch) of a key below `claims`; None if it is not a claim's."""
    match = re.fullmatch(r".*/claims/(\d{5,9})/(\d{6,9})\.json", key, re.ASCII)
    return (int(match[1]), int(match[2])) if match else None


def shard(index: int, incarnation: str, sequence: int) -> str:
    """One shard of an incarnation."""
    return f"{iteration(index)}journal/{incarnation}/{sequence:08d}.arrow"


def journal(index: int) -> str:
    """Prefix of an iteration's journal."""
    return f"{iteration(index)}journal/"


def environment_states(index: int) -> str:
    """Prefix of the states of an iteration's environments that are too large for a shard."""
    return f"{iteration(index)}environment/"


def environment_state(index: int, digest: str) -> str:
    """The state of an environment after a turn, as JSON, named by its digest."""
    return f"{environment_states(index)}{digest}.json"


def asks(index: int) -> str:
    """Prefix of an iteration's asks."""
    return f"{iteration(index)}asks/"


def ask(index: int, incarnation: str, number: int) -> str:
    """Ask `number` to the incarnation that holds the responses."""
    return f"{asks(index)}{incarnation}/{number:06d}.json"


def alive(index: int, incarnation: str) -> str:
    """The heartbeat of an incarnation."""
    return f"{iteration(index)}alive/{incarnation}.json"


def alive_all(index: int) -> str:
    """Prefix of an iteration's heartbeats."""
    return f"{iteration(index)}alive/"


def ended(index: int, execution_digest: str) -> str:
    """Prefix of the records, one per pool, that a rollout map of this execution has ended."""
    return f"{iteration(index)}ended/{execution_digest}/"


def batch(index: int, number: int) -> str:
    """The record of one micro-batch."""
    return f"{iteration(index)}batches/{number:06d}.json"


def batches(index: int) -> str:
    """Prefix of the records of an iteration's micro-batches."""
    return f"{iteration(index)}batches/"


def teacher_scores(index: int, number: int) -> str:
    """The teachers' scores of the responses in one micro-batch."""
    return f"{iteration(index)}teacher/{number:06d}.arrow"


def scoring(index: int) -> str:
    """Prefix of what the scorers of an iteration write: a store of its own, laid out like a run's iteration."""
    return f"{iteration(index)}scoring/"


def closed(index: int) -> str:
    """The mark that no further token of this iteration will be used; never deleted."""
    return f"{iteration(index)}closed.json"


def collected(index: int) -> str:
    """The cost of recording this iteration's groups apart from training, until the train phase was due."""
    return f"{iteration(index)}collected.json"


def due(index: int) -> str:
    """The mark that enough groups are recorded for the iteration's phase to begin on a shared trainer."""
    return f"{iteration(index)}due.json"


def responses(index: int) -> str:
    """The record that completes compaction, with the names of the parts that hold the iteration's responses."""
    return f"{iteration(index)}responses.json"


def responses_parts(index: int) -> str:
    """Prefix of the parts of an iteration's responses."""
    return f"{iteration(index)}responses/"


def responses_part(index: int, first: int, last: int) -> str:
    """The recorded responses of an iteration from one number to another."""
    return f"{responses_parts(index)}{first:07d}-{last:07d}.arrow"


def training(index: int) -> str:
    """The trainer's measurements in this iteration, written before the trainer publishes the weights."""
    return f"{iteration(index)}training.json"


def nonfinite(index: int) -> str:
    """Why the last attempt to train this iteration stopped; overwritten by the next attempt that stops so."""
    return f"{iteration(index)}nonfinite.json"


def phase_failure(index: int) -> str:
    """Why a host could not train this iteration's phase; overwritten by the next attempt that fails so."""
    return f"{iteration(index)}phase_failure.json"


def report(index: int) -> str:
    """The report of an iteration; it commits the iteration."""
    return f"{iteration(index)}report.json"


def lengths(index: int) -> str:
    """The run's table of learned lengths up to this iteration; planning can do without the table."""
    return f"{LENGTHS}{index:06d}.safetensors"


def lengths_iteration(key: str) -> int | None:
    """Returns the iteration of a key below LENGTHS; None if the key is not a table's."""
    match = re.fullmatch(rf"{LENGTHS}(\d{{6,}})\.safetensors", key)
    return int(match[1]) if match else None


def kept_prompts(digest: str) -> str:
    """The rows of the source that are the run's prompts; the digest is that of the record's body."""
    return f"{KNOWN}{digest}.json"


def known_lengths(digest: str) -> str:
    """The lengths that another run has learned of the prompts, named by content; planning can do without the table."""
    return f"{KNOWN}{digest}.safetensors"


def forecast(digest: str) -> str:
    """A forecast of the run; the digest (hexadecimal) is that of its bytes."""
    return f"{FORECASTS}{digest}.json"


def grading(name: str) -> str:
    """The rewards of a grading beside the run's own; the name is one that `gradings.check_name` accepts."""
    return f"{GRADINGS}{name}/grading.json"


def graded(name: str, index: int) -> str:
    """The rewards that a grading gives to the responses of an iteration."""
    return f"{GRADINGS}{name}/{index:06d}.json"


def request(name: str) -> str:
    """A request to `gleaner serve` under a key of its client; the name (hexadecimal) is the key's digest."""
    return f"{REQUESTS}{name}.json"


def failure(task: str) -> str:
    """The last failure of a task, in a place where machines that join a run do not write."""
    return f"{FAILURES}{task}.json"


def slot_failures(execution_digest: str, index: int) -> str:
    """Prefix of the last failures of an iteration's slots in this execution."""
    return f"{FAILURES}rollout/{execution_digest}/{index:06d}/"


def slot_failure(execution_digest: str, index: int, slot: int) -> str:
    """The last failure of a slot in an iteration."""
    return f"{slot_failures(execution_digest, index)}{slot:05d}.json"


def lease(epoch: int) -> str:
    """One epoch of the run's lease."""
    return f"{LEASE}{epoch:06d}.json"


def deck(index: int) -> str:
    """The iteration's Deck as one page, for readers without a Flyte console."""
    return f"{iteration(index)}deck.html"


def evaluation_name(version: int, settings_digest: str) -> str:
    """Returns the name of an evaluation of one weight version; the digest (hexadecimal) is that of its settings."""
    return f"{version:08d}-{settings_digest}"


def evaluation(name: str) -> str:
    """The record of an ended evaluation; what it was made from lies at `evaluation_url`."""
    return f"{EVALUATIONS}{name}.json"


def evaluation_deck(name: str) -> str:
    """The Deck of an ended evaluation as one page."""
    return f"{EVALUATIONS}{name}.html"


def evaluation_directory(name: str) -> str:
    """The prefix of an evaluation's own directory: one iteration, laid out like a run's, without training."""
    return f"{EVALUATIONS}{name}/"


def evaluation_url(run_url: str, name: str) -> str:
    """Returns the url of an evaluation's own directory."""
    return f"{run_url.rstrip('/')}/{evaluation_directory(name).rstrip('/')}"


def evaluated(url: str) -> tuple[str, str]:
    """Returns (url of the run, name of the evaluation) for an evaluation's url; raises ValueError for any other url."""
    match = re.fullmatch(rf"(.+)/{EVALUATIONS}(\d{{8}}-[0-9a-f]+)", url.rstrip("/"))
    if match is None:
        raise ValueError(f"evaluation: url {url!r}; allowed: <run>/{EVALUATIONS}<version>-<digest>")
    return match[1], match[2]


def teacher(name: str) -> str:
    """Prefix of the tensors of a teacher."""
    return f"{TEACHERS}{name}/"


def reward_model(name: str) -> str:
    """The list of the files and chunks of this reward model, written after its chunks."""
    return f"{REWARD_MODELS}{name}.json"


def reward_model_chunk(digest: str) -> str:
    """A piece of a file, named by its content; models of different names may share it."""
    return f"{REWARD_MODELS}chunks/{digest}"
