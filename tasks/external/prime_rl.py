"""prime-rl's trainer with this project's rollouts: `feed` stands in for prime-rl's orchestrator.

Both sides meet in prime-rl's output directory. `feed` writes each step's micro-batches where the trainer's filesystem
transport reads; the trainer's filesystem broadcast writes the weights that `feed` publishes. Written for prime-rl
0.8.0, which itself is not imported.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from storage.clock import Clock, SystemClock
from storage.errors import WrongInputError
from storage.waiting import Wait
from tasks.external.groups import Group
from tasks.external.handed_weights import folder_tensors
from tasks.external.rollouts import Rollouts, rollouts

_STEP, _LOOK_S = "step_", 1.0
# prime-rl logs by environment.
_ENVIRONMENT = "gleaner"


class PrimeMisfit(WrongInputError):  # noqa: N818 - reads as what happened
    """prime-rl's trainer cannot take a response, or shows no sign of life."""


class _Sample(NamedTuple):
    token_ids: list[int]
    mask: list[bool]
    advantage: float
    logprobs: list[float]


def feed(
    config: Mapping[str, Any] | str | Path,
    output_dir: str | Path,
    *,
    steps: int,
    ranks: int,
    seq_len: int,
    limit_s: float = 3600.0,
    clock: Clock | None = None,
) -> None:
    """Give prime-rl's trainer the groups of its steps, and publish its weights, until it has done `steps` steps.

    Started again, it goes on where the trainer stands, with the same micro-batches.

    Args:
        config: The run's configuration, with trainer.placement "external" and rewards.
        output_dir: prime-rl's, with `rollout_transport.type` and `weight_broadcast.type` "filesystem".
        steps: prime-rl's max_steps.
        ranks: The trainer's data-parallel ranks.
        seq_len: The most tokens of a micro-batch, prime-rl's model.seq_len.
        limit_s: How long the trainer may take for a step.
        clock: Another clock, in tests.

    Raises:
        PrimeMisfit: There is no rank, a response is longer than seq_len, the run has no rewards or filters groups, or
            the trainer has written no weights for limit_s.
    """
    folder, clock = Path(output_dir), clock or SystemClock()
    for name, value in (("ranks", ranks), ("seq_len", seq_len)):
        if value < 1:
            raise PrimeMisfit(f"{name}: value {value}; allowed: at least 1")
    with rollouts(config) as source:
        if not source.config.rewards:
            raise PrimeMisfit(
                "rewards: value []; allowed with prime-rl: at least one, because advantages follow from them"
            )
        if source.config.algorithm.filter_groups:
            raise PrimeMisfit(
                "algorithm.filter_groups: value true; allowed with prime-rl: false, because each step needs a group"
            )
        while True:
            version = _newest(folder)
            if source.step == version - 1:
                source.publish(folder_tensors(_weights(folder, version)), step=version - 1)
            if version >= steps:
                return
            samples = _packed(_samples(source, version), ranks, seq_len, source.config.sampling.temperature)
            written = folder / "rollouts" / f"{_STEP}{version + 1}"
            _write(written, samples)
            awaited = f"prime-rl's trainer to write the weights of step {version + 1} to {folder}"
            _await_other(folder, version, written, Wait(awaited, clock, limit_s, "the call ends then (limit_s)"))


def _weights(folder: Path, version: int) -> Path:
    return folder / "broadcasts" / f"{_STEP}{version}"


def _newest(folder: Path) -> int:
    """The version at which the trainer stands; 0 for the first weights."""
    stable = (folder / "broadcasts").glob(f"{_STEP}*/STABLE")
    return max((int(each.parent.name.removeprefix(_STEP)) for each in stable), default=0)


def _await_other(folder: Path, version: int, written: Path, wait: Wait) -> None:
    """Return when the trainer has written a version, or has gone back and deleted what follows its checkpoint."""
    while _newest(folder) == version and written.exists():
        if wait.is_over:
            raise PrimeMisfit(f"{folder}: the trainer has written no weights after version {version} (limit_s)")
        wait.pause(_LOOK_S)


def _samples(source: Rollouts, step: int) -> list[_Sample]:
    groups = sorted(source.next(step), key=lambda group: group.number)
    return [sample for group in groups for sample in _of_group(group)]


def _of_group(group: Group) -> Iterable[_Sample]:
    """Each response with its reward less the group's mean, which is prime-rl's advantage."""
    mean, before = group.mean_reward, len(group.prompt_token_ids)
    for response in group.responses:
        is_whole = response.reward is not None
        yield _Sample(
            [*group.prompt_token_ids, *response.token_ids.tolist()],
            [False] * before + [is_whole and own for own in response.policy_mask.tolist()],
            0.0 if response.reward is None else response.reward - mean,
            [0.0] * before + response.token_logprobs.tolist(),
        )


def _packed(samples: Sequence[_Sample], ranks: int, seq_len: int, temperature: float) -> list[list[list[Any]]]:
    """The micro-batches of each rank: as many for each, the longest samples first."""
    bins: list[list[_Sample]] = []
    for sample in sorted(samples, key=lambda each: -len(each.token_ids)):
        size = len(sample.token_ids)
        if size > seq_len:
            raise PrimeMisfit(f"seq_len: value {seq_len}; allowed here: at least {size}, as a response with its prompt")
        room = (each for each in bins if sum(len(other.token_ids) for other in each) + size <= seq_len)
        found = next(room, None)
        if found is None:
            bins.append(found := [])
        found.append(sample)
    shortest = bins[-1][-1]
    untrained = shortest._replace(mask=[False] * len(shortest.mask), advantage=0.0)
    bins += [[untrained]] * (-len(bins) % ranks)
    return [[_micro_batch(each, temperature) for each in bins[rank::ranks]] for rank in range(ranks)]


def _micro_batch(samples: Sequence[_Sample], temperature: float) -> list[Any]:
    """The fields of prime-rl's MicroBatch in its order, which is how it goes over the wire."""
    lengths = [len(sample.token_ids) for sample in samples]
    total = sum(lengths)
    return [
        [token for sample in samples for token in sample.token_ids],
        [own for sample in samples for own in sample.mask],
        [sample.advantage for sample, length in zip(samples, lengths, strict=True) for _ in range(length)],
        [logprob for sample in samples for logprob in sample.logprobs],
        [place for length in lengths for place in range(length)],
        lengths,
        [temperature] * total,
        [_ENVIRONMENT] * total,
        lengths,
    ]


def _write(folder: Path, ranks: Sequence[Sequence[Any]]) -> None:
    import msgpack  # noqa: PLC0415 - flytekit brings it

    folder.mkdir(parents=True, exist_ok=True)
    for rank, micro_batches in enumerate(ranks):
        started = folder / f"rank_{rank}.bin.tmp"
        started.write_bytes(msgpack.packb(micro_batches))
        started.replace(folder / f"rank_{rank}.bin")
