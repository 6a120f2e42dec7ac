"""Rollouts for an external trainer: `gleaner.rollouts` plans, hands out finished groups, and publishes new weights.

The program that trains has no state here. A program that is killed anywhere and started again gets the same groups,
because every micro-batch is recorded before it is handed out, and publishes a version once.
"""

import logging
import operator
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from storage.clock import Clock, SystemClock
from storage.journal.compaction import read_batches
from storage.records import layout, model_files, prompt_table, records
from storage.records.records import PlanRecord, TrainingRecord
from storage.records.run import connect_to_run, exists, first_open, is_trained, read_plan, read_run
from storage.stores.connect import connect
from storage.stores.metered import MeteredStore
from storage.stores.store import ConflictingRecord, ObjectStore
from storage.weights.manifest import PUBLISHED_AT_S, TensorBlock
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import WEIGHTS_FULL_INTERVAL, publish_version, pull_version, repeat_version
from tasks.configuration.data import SUBMITTED
from tasks.configuration.run_config import RunConfig, load, parse, parse_held
from tasks.configuration.trainer import EXTERNAL
from tasks.external.groups import Group, groups_of
from tasks.external.handed_weights import handed_blocks
from tasks.external.plans import FollowedPlans, OwnPlans, Plans, WrongStep
from tasks.learning.recorded_batches import Batches
from tasks.learning.replayed_batches import ReplayedBatches
from tasks.preparing.checks import check_settings
from tasks.prompts.decode import open_completion_decoder
from tasks.prompts.plain_values import check_text
from tasks.prompts.submitted import SubmittedPrompts

log = logging.getLogger(__name__)
SOURCE = {"source": EXTERNAL}
_DOCUMENTS = (".yaml", ".yml", ".json")
_SHOWN_CHARACTERS = 120


class Rollouts:
    """The rollouts of a run whose trainer is the calling program; a context manager, for one thread at a time.

    With submitted prompts, threads may beside take `next` of one step each, and then give `publish` its step.

    `next` and `publish` take turns, step by step from 0; where this process plans, `next` may be ahead of `publish` by
    algorithm.max_staleness steps. Every other order is refused in one line. Members come from `gleaner join` on any
    machine, or from the execution that is followed.
    """

    def __init__(self, config: RunConfig, clock: Clock | None = None, *, follows: bool = False) -> None:
        """Check the settings; raises ValueError and LookupError as `gleaner check`. Nothing is created yet.

        follows: a Flyte execution plans and concludes; False: this process does.
        """
        if not config.trainer.is_external:
            raise WrongStep(f"trainer.placement: value {config.trainer.placement!r}; allowed here: {EXTERNAL!r}")
        if not follows and config.evaluation is not None and config.evaluation.interval:
            raise WrongStep(
                f"evaluation.interval: value {config.evaluation.interval}; allowed here: 0, because no node evaluates; "
                "`pyflyte run workflows/evaluation.py` evaluates published versions"
            )
        check_settings(config)
        self._config = config
        self._clock = SystemClock() if clock is None else clock
        self._store = MeteredStore(connect(config.run.url))
        self._plans: Plans = (FollowedPlans if follows else OwnPlans)(self._store, config, self._clock)
        # The step whose groups were handed out last; by step, when groups were asked for, and how long they took.
        self._step: int | None = None
        self._began_at_s: dict[int, float] = {}
        self._waited_s: dict[int, float] = {}
        # The version that was published last, and its tensors: the base of the next difference.
        self._base: tuple[int, dict[str, TensorBlock]] | None = None

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def follows(self) -> bool:
        """Whether a Flyte execution plans and concludes."""
        return isinstance(self._plans, FollowedPlans)

    @property
    def _ahead(self) -> int:
        """How many further steps this process plans beside a step."""
        return 0 if self.follows else self._config.algorithm.max_staleness

    @property
    def url(self) -> str:
        """The run's directory, for `gleaner join` and `gleaner.open`."""
        return self._store.url

    @property
    def step(self) -> int:
        """The first step without a published version: where a program that is started again goes on."""
        first = first_open(self._store)
        return first + (exists(self._store, layout.plan(first)) and is_trained(self._store, first))

    def __enter__(self) -> Self:
        """Conclude a step that an earlier life of the program has published and not concluded."""
        first = first_open(self._store)
        if self.step > first:
            self._plans.conclude(first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._plans.close()

    def submit(self, step: int, prompts: Sequence[Any]) -> None:
        """Plan a step with these prompts, one group for each; members begin at once.

        With data.source "submitted" each step is planned so, and before its `next`. Giving a step the same prompts
        again does nothing.

        Args:
            step: At most algorithm.max_staleness steps after the first unpublished one.
            prompts: Each is text, a list of chat messages, or a mapping with `prompt`, columns for the rewards, and
                perhaps the tokens as `prompt_token_ids`, which are then taken as they are.

        Raises:
            PromptError: A prompt cannot be used; names it by its number.
            WrongStep: The step cannot be planned now, or has other prompts.
            RunBusy: Another process advances the run.
        """
        if self._config.data.source != SUBMITTED:
            raise WrongStep(f"data.source: value {self._config.data.source!r}; allowed for submit: {SUBMITTED!r}")
        given, step = SubmittedPrompts(prompts), _whole(step)
        if step not in range(first_open(self._store)):
            self._plans.plan(step, given)
        held = [row.prompt_id for row in prompt_table.read_prompts(self._store, read_plan(self._store, step))]
        if held != [prompt.id for prompt in given]:
            raise WrongStep(f"step {step} is planned with other prompts; allowed: the {len(held)} prompts it has")

    def next(self, step: int) -> Iterator[Group]:
        """The groups of a step as they finish, in the recorded order, which every later call repeats.

        Args:
            step: An earlier step, whose groups are read again, or at most algorithm.max_staleness steps after the first
                unpublished one.

        Raises:
            WrongStep: The run cannot take the step now.
            GroupTimeout: The journal has not grown for trainer.group_timeout_s.
            GradingError, CorruptObject, RunBusy: As for the train task.
        """
        step, first = _whole(step), first_open(self._store)
        if not 0 <= step < first:
            if self._config.data.source != SUBMITTED:
                for planned in dict.fromkeys((step, *range(first, first + self._ahead + 1))):
                    self._plans.plan(planned, None)
            elif not exists(self._store, layout.plan(step)):
                raise WrongStep(f"step {step}: value of next; allowed with data.source {SUBMITTED!r}: after its submit")
        self._step, self._began_at_s[step], self._waited_s[step] = step, self._clock.wall(), 0.0
        return self._groups(read_plan(self._store, step))

    def publish(
        self,
        tensors: Mapping[str, Any] | str | Path | None,
        metrics: Mapping[str, float] | None = None,
        *,
        step: int | None = None,
    ) -> bool:
        """Publish the weights after a step as the next version, and conclude the step.

        Returns False if other weights were published first, by an earlier life of this program: members go on from
        those, and `Run.model` reads them.

        Args:
            tensors: A folder in transformers' format, or torch tensors or arrays by their names in version 0; None:
                the weights stay as they are.
            metrics: Numbers for the report, such as {"loss": 0.3}.
            step: None: that of the last `next`.

        Raises:
            WrongStep: No step is under way, some of its groups were not handed out, or an earlier step is
                unpublished.
            WeightsMisfit: A tensor is missing, unknown, not finite, or of another shape or dtype.
            RunBusy: Another process advances the run.
            ValueError: A metric is no number.
        """
        numbers, step = _numbers(metrics or {}), self._step if step is None else _whole(step)
        if step is None or not exists(self._store, layout.closed(step)):
            raise WrongStep(
                "publish: no step is under way" if step is None else f"publish: step {step} has groups to come"
            )
        if not self._is_published(step):
            raise WrongStep(f"publish: step {step}; allowed now: {self.step}, because versions come in order")
        blocks = None if tensors is None else handed_blocks(tensors, read_manifest(self._store, layout.weights(0)))
        if not exists(self._store, layout.report(step)):
            self._plans.hold()
            self._record(step, numbers)
        is_own = self._publish(step + 1, blocks) if blocks is not None else self._repeat(step + 1)
        self._plans.conclude(step)
        if self._step == step:
            self._step = None
        return is_own

    def _is_published(self, version: int) -> bool:
        """Whether a version is published, or was and is deleted, after which the report of its step stays."""
        return any(
            exists(self._store, key) for key in (layout.manifest(layout.weights(version)), layout.report(version))
        )

    def _groups(self, plan: PlanRecord) -> Iterator[Group]:
        store = self._store
        prompts = prompt_table.read_prompts(store, plan)
        with ExitStack() as stack:
            folder = stack.enter_context(model_files.downloaded(store))
            decode = open_completion_decoder(folder, plan.sampling)
            batches: Batches
            if exists(store, layout.closed(plan.iteration)):
                batches = ReplayedBatches(store, plan)
            else:
                batches = stack.enter_context(self._plans.batches(plan, prompts, folder))
            for batch in batches:
                self._waited_s[plan.iteration] = batches.waited_s
                yield from groups_of(batch, plan, prompts, batches, decode)

    def _record(self, step: int, metrics: dict[str, float]) -> None:
        """Commit the training record; the record of an earlier life of the program stays."""
        now_s = self._clock.wall()
        began_at_s = self._began_at_s.pop(step, now_s)
        requests = self._store.requests
        graded = [each.reward for batch in read_batches(self._store, step) for each in batch.graded]
        rewards = [reward for reward in graded if reward is not None]
        of_run = {"reward": sum(rewards) / max(1, len(rewards))} if self._config.rewards else {}
        record = TrainingRecord(
            iteration=step,
            weight_version=step + 1,
            metrics=metrics
            | of_run
            | {
                "timing_s/wait": self._waited_s.pop(step, 0.0),
                "requests/train_puts": float(requests.puts),
                "requests/train_gets": float(requests.gets),
            },
            reward_errors=(),
            started_at_s=began_at_s,
            ended_at_s=max(now_s, began_at_s),
        )
        records.commit(self._store, layout.training(step), record)

    def _repeat(self, version: int) -> bool:
        """Publish the weights of version - 1 once more; False if other weights are there already."""
        try:
            if repeat_version(self._store, version, SOURCE | {PUBLISHED_AT_S: self._clock.wall()}):
                return True
        except ConflictingRecord as error:
            log.warning("weight version %d was published earlier with other weights, which stay: %s", version, error)
            return False
        return self._publish(version, pull_version(self._store, version - 1, None, self._clock)[1])

    def _publish(self, version: int, blocks: dict[str, TensorBlock]) -> bool:
        store: ObjectStore = self._store
        if exists(store, layout.report(version - 1)) and not exists(store, layout.manifest(layout.weights(version))):
            log.info("weight version %d was published, and deleted since", version)
            return False
        is_there = exists(store, layout.manifest(layout.weights(version)))
        if not is_there and (self._base is None or self._base[0] != version - 1):
            # A program that was started again reads the version before once.
            self._base = (version - 1, pull_version(store, version - 1, None, self._clock)[1])
        try:
            publish_version(
                *(store, version, blocks, SOURCE),
                base={} if self._base is None else self._base[1],
                full_interval=WEIGHTS_FULL_INTERVAL,
                before_manifest=lambda: {PUBLISHED_AT_S: self._clock.wall()},
            )
        except ConflictingRecord as error:
            log.warning("weight version %d was published earlier with other weights, which stay: %s", version, error)
            self._base = None
            return False
        self._base = (version, blocks)
        return True


def _whole(step: Any) -> int:
    """The step as Python's int; raises WrongStep for no whole number."""
    try:
        return operator.index(step)
    except TypeError:
        raise WrongStep(f"step: value {step!r}; allowed: a whole number") from None


def _numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics as Python's floats; raises ValueError, which names the first that is none."""
    found = {}
    for name, value in metrics.items():
        try:
            found[check_text(name, "metrics: a name")] = float(value)
        except (AttributeError, OverflowError, RuntimeError, TypeError, ValueError):
            shown = f"{name!r} is {value!r}"[:_SHOWN_CHARACTERS]
            raise ValueError(f"metrics: {shown}; allowed: numbers by name") from None
    return found


def rollouts(config: Mapping[str, Any] | str | Path) -> Rollouts:
    """The rollouts of a run, for a program that trains; see `Rollouts`.

    config: A YAML or JSON file, or an equivalent mapping, with trainer.placement "external": this process plans and
    concludes. Or the run.url of a run that a Flyte execution advances with that placement: the execution plans and
    concludes. Raises ConfigError, and LookupError if there is no run.
    """
    if isinstance(config, str) and not Path(config).is_file() and not config.endswith(_DOCUMENTS):
        store = connect_to_run(config)
        held = parse_held(read_run(store).config)
        return Rollouts(replace(held, run=replace(held.run, url=store.url)), follows=True)
    return Rollouts(parse(config) if isinstance(config, Mapping) else load(config))
