"""Advancing a run by one weight version: restore the learner, train one iteration, make the result durable.

Whatever an earlier attempt finished is not done again: weights published, checkpoint written, batches recorded.
"""

import logging
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch

from storage import layout, model_files, prompt_table, records
from storage.clock import Clock
from storage.connect import connect
from storage.records import PlanRecord, TrainingRecord
from storage.run import beat_lease, exists, read_config, read_plan
from storage.store import ConflictingRecord, ObjectStore, StorageError, commit
from storage.weight_manifest import TensorBlock
from storage.weight_versions import publish_version, pull_version
from storage.weights import PUBLISHED_AT_S, read_manifest
from tasks.configuration.run_config import RunConfig, parse
from tasks.grading.run_rewards import open_grader
from tasks.learning import checkpoint
from tasks.learning.checkpoint import TrainerState
from tasks.learning.critic import Critic
from tasks.learning.importance import same_engine
from tasks.learning.learner import CriticLearner, Learner
from tasks.learning.nonfinite import keep_nonfinite
from tasks.learning.optimizer import PolicyOptimizer
from tasks.learning.policy import Policy
from tasks.learning.staleness import check_staleness
from tasks.learning.trainer import IterationTrainer
from tasks.sampling.weight_tensors import DTYPES, as_block, as_torch

log = logging.getLogger(__name__)
BEATS_PER_TTL = 5
REFERENCE_VERSION = 0


def advance(run_url: str, iteration: int, execution: str, clock: Clock) -> TrainingRecord:
    """Train an iteration and publish the next weight version; returns what was measured. Done once, also by a late try.

    Raises whatever makes the step impossible (TooStaleError, GroupTimeout, GradingError, NonFiniteGradient,
    CorruptObject); nothing is published then, and the next attempt replays the recorded batches.
    """
    started_at_s = clock.wall()
    store = connect(run_url)
    plan = read_plan(store, iteration)
    config = parse(read_config(store, plan), f"the configuration of iteration {iteration}")
    version = iteration + 1
    with keep_lease(store, execution, config.run.lease_ttl_s, clock):
        # A committed iteration's weights may have been deleted since.
        done = (layout.manifest(layout.weights(version)), layout.report(iteration))
        if not any(exists(store, key) for key in done):
            check_staleness(plan, config.algorithm.max_staleness)
            with tempfile.TemporaryDirectory(prefix="gleaner-model-") as folder:
                model_files.download(store, Path(folder))
                _train_and_publish(store, plan, config, Path(folder), clock, started_at_s)
    return records.read(store, TrainingRecord, layout.training(iteration))


def _train_and_publish(
    store: ObjectStore,
    plan: PlanRecord,
    config: RunConfig,
    model: Path,
    clock: Clock,
    started_at_s: float,
) -> None:
    # What is trained is the iteration's own version, whichever its tokens were sampled from.
    before, version = plan.iteration, plan.iteration + 1
    done = exists(store, layout.manifest(layout.checkpoint(version)))
    learner = restore_learner(store, version if done else before, config, model, clock)
    base: dict[str, TensorBlock] | None = None
    if not done:
        base = published_blocks(store, learner.policy, lasting=True)
        prompts = prompt_table.decode_prompts(plan.prompts_key, store.get(plan.prompts_key))
        rewards = open_grader(store, config.rewards, config.trainer.device)
        with rewards as grader, keep_nonfinite(store, plan):
            record = IterationTrainer(
                store,
                plan,
                prompts=prompts,
                learner=learner,
                grader=grader,
                decode=_decoder(model),
                algorithm=config.algorithm,
                trainer=config.trainer,
                clock=clock,
                started_at_s=started_at_s,
                same_engine=same_engine(config.rollout, config.trainer),
            ).step()
        commit(store, layout.training(plan.iteration), records.encode(record))
        if not _save(store, version, learner):
            # The run goes on from what is stored. Two learners would not fit a device that was chosen for one.
            del learner
            learner = restore_learner(store, version, config, model, clock)
    if base is None:
        _, base = pull_version(store, before, None, clock)
    publish_version(
        store,
        version,
        published_blocks(store, learner.policy),
        {"source": "train", PUBLISHED_AT_S: clock.wall()},
        base=base,
        full_interval=config.trainer.weights_full_interval,
    )
    log.info("published weight version %d", version)


def _save(store: ObjectStore, version: int, learner: Learner) -> bool:
    """Write the checkpoint: False when another trainer was first, whose last bits differ, as they do on a GPU.

    The critic's comes first, and may be another trainer's even when the policy's is ours: both learned from the same.
    """
    if learner.critic is not None:
        with suppress(ConflictingRecord):
            critic, optimizer = learner.critic.critic, learner.critic.optimizer
            state = TrainerState.capture(version, optimizer)
            checkpoint.save(store, layout.critic_checkpoint(version), critic, optimizer, state)
    state = TrainerState.capture(version, learner.optimizer)
    try:
        checkpoint.save(store, layout.checkpoint(version), learner.policy, learner.optimizer, state)
    except ConflictingRecord:
        return False
    return True


def restore_learner(store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock) -> Learner:
    """Policy and optimizer as they were at `version`, and the reference and the critic if the algorithm needs them."""
    saved = checkpoint.read(store, layout.checkpoint(version)) if version else None
    policy = Policy(model, saved.parameters if saved else _pull_tensors(store, version, clock), config.trainer)
    optimizer = PolicyOptimizer(policy.parameters(), config.optimizer)
    if saved:
        checkpoint.restore(saved, policy, optimizer)
    reference = None
    if config.algorithm.kl_coef > 0:
        reference = Policy(model, _pull_tensors(store, REFERENCE_VERSION, clock), config.trainer, trainable=False)
    critic = None
    if config.algorithm.advantage_estimator == "gae":
        critic = _restore_critic(store, version, config, model, clock)
    return Learner(policy, optimizer, reference, critic)


def _restore_critic(store: ObjectStore, version: int, config: RunConfig, model: Path, clock: Clock) -> CriticLearner:
    settings = config.critic
    if not version:
        critic = Critic.of_policy(model, _pull_tensors(store, version, clock), config.trainer)
        optimizer = PolicyOptimizer(critic.parameters(), settings.optimizer)
        return CriticLearner(critic, optimizer, settings.warmup_iterations)
    saved = checkpoint.read(store, layout.critic_checkpoint(version))
    critic = Critic(model, saved.parameters, config.trainer)
    optimizer = PolicyOptimizer(critic.parameters(), settings.optimizer)
    checkpoint.restore(saved, critic, optimizer)
    return CriticLearner(critic, optimizer, settings.warmup_iterations)


def published_blocks(store: ObjectStore, policy: Policy, *, lasting: bool = False) -> dict[str, TensorBlock]:
    """The policy as it is published, each tensor in the dtype in which the run's first weights give it.

    `lasting`: it must not change with the next step. That costs the trainer's host the bytes of one weight version, 2
    per parameter in bfloat16 beside the 16 of parameters, gradients and moments.
    """
    state = policy.module.state_dict(keep_vars=True)
    first = {name: DTYPES[entry.dtype] for name, entry in read_manifest(store, layout.weights(0)).tensors.items()}
    # Tied tensors are one object under several names, any of which may be the one in the first weights.
    given = {id(state[name]): dtype for name, dtype in first.items()}
    usual, _ = Counter(dtype for dtype in first.values() if dtype.is_floating_point).most_common(1)[0]
    blocks = {}
    for name, converted in policy.tensors(usual).items():
        dtype = first.get(name, given[id(state[name])])
        as_usual = dtype == usual or not converted.is_floating_point()
        tensor = converted if as_usual else state[name].detach().to("cpu", dtype)
        # Float32 tensors of a policy on the CPU are the parameters themselves.
        blocks[name] = as_block(tensor.clone() if lasting and tensor.dtype == torch.float32 else tensor)
    return blocks


@contextmanager
def keep_lease(store: ObjectStore, execution: str, ttl_s: float, clock: Clock) -> Iterator[None]:
    """Show, from a thread, that this execution lives, so that no other succeeds it."""
    ended = threading.Event()

    def beat() -> None:
        while not ended.wait(ttl_s / BEATS_PER_TTL):
            try:
                beat_lease(store, execution, clock)
            except StorageError as error:
                log.warning("the run's lease could not be refreshed: %s", error)

    thread = threading.Thread(target=beat, name="lease", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _pull_tensors(store: ObjectStore, version: int, clock: Clock) -> dict[str, torch.Tensor]:
    _, blocks = pull_version(store, version, None, clock)
    return {name: as_torch(block) for name, block in blocks.items()}


def _decoder(model: Path) -> Callable[[Sequence[int]], str]:
    from transformers import AutoTokenizer  # noqa: PLC0415 - costs seconds

    tokenizer: Any = AutoTokenizer.from_pretrained(str(model))

    def decode(token_ids: Sequence[int]) -> str:
        text: str = tokenizer.decode(list(token_ids), skip_special_tokens=True)
        return text

    return decode
