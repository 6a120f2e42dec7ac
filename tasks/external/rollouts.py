"""Rollouts for an external trainer: `gleaner.rollouts` plans, hands out finished groups, and publishes new weights.

The program that trains has no state here. A program that is killed anywhere and started again gets the same groups,
because every micro-batch is recorded before it is handed out, and publishes a version once.
"""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from storage.clock import Clock, SystemClock
from storage.errors import WrongInputError
from storage.process_identity import process_name
from storage.records import layout, model_files, prompt_table, records
from storage.records.records import PlanRecord, TrainingRecord
from storage.records.run import exists, holds_run, is_trained, next_iteration, read_plan, release_lease
from storage.stores.connect import connect
from storage.stores.metered import MeteredStore
from storage.stores.store import ConflictingRecord, ObjectStore
from storage.weights.manifest import PUBLISHED_AT_S, TensorBlock
from storage.weights.tensor_sets import read_manifest
from storage.weights.versions import publish_version, pull_version
from tasks.concluding.iteration import commit_and_report
from tasks.configuration.data import SUBMITTED
from tasks.configuration.iteration_config import config_in_force
from tasks.configuration.references import PlanReference
from tasks.configuration.run_config import RunConfig, load, parse
from tasks.configuration.trainer import EXTERNAL
from tasks.external.groups import Group, groups_of
from tasks.external.handed_weights import handed_blocks
from tasks.learning.lease import keep_lease
from tasks.learning.opened_batches import opened_batches
from tasks.learning.recorded_batches import Batches
from tasks.learning.replayed_batches import ReplayedBatches
from tasks.preparing.checks import check_settings
from tasks.preparing.iteration import prepare
from tasks.prompts.decode import open_completion_decoder
from tasks.prompts.submitted import SubmittedPrompts
from tasks.sampling.session.crew_watch import CrewWatch

log = logging.getLogger(__name__)
SOURCE = {"source": EXTERNAL}
# Of ten versions one is stored whole, as by our own trainer.
WEIGHTS_FULL_INTERVAL = 10


class WrongStep(WrongInputError):  # noqa: N818 - reads as what happened
    """The step, or the order of calls, is not one that the run can take now."""


class Rollouts:
    """The rollouts of a run whose trainer is the calling program; a context manager, for one thread at a time.

    `next` and `publish` take turns, step by step from 0; every other order is refused in one line. Members come from
    `gleaner join` on any machine.
    """

    def __init__(self, config: RunConfig, clock: Clock | None = None) -> None:
        """Check the settings; raises ValueError and LookupError as `gleaner check`. Nothing is created yet."""
        if not config.trainer.is_external:
            raise WrongStep(f"trainer.placement: value {config.trainer.placement!r}; allowed here: {EXTERNAL!r}")
        if config.evaluation is not None and config.evaluation.interval:
            raise WrongStep(
                f"evaluation.interval: value {config.evaluation.interval}; allowed here: 0, because no node evaluates; "
                "`pyflyte run workflows/evaluation.py` evaluates published versions"
            )
        check_settings(config)
        self._config = config
        self._clock = SystemClock() if clock is None else clock
        self._execution = process_name()
        self._stack = ExitStack()
        self._store: MeteredStore = MeteredStore(connect(config.run.url))
        self._holds_lease = False
        # The step whose groups were handed out last, and when they were asked for.
        self._step: int | None = None
        self._began_at_s = 0.0
        self._waited_s = 0.0
        # The version that was published last, and its tensors: the base of the next difference.
        self._base: tuple[int, dict[str, TensorBlock]] | None = None

    @property
    def config(self) -> RunConfig:
        return self._config

    @property
    def url(self) -> str:
        """The run's directory, for `gleaner join` and `gleaner.open`."""
        return self._store.url

    @property
    def step(self) -> int:
        """The first step without a published version: where a program that is started again goes on."""
        if not holds_run(self._store):
            return 0
        first = next_iteration(self._store)
        return first + (exists(self._store, layout.plan(first)) and is_trained(self._store, first))

    def __enter__(self) -> Self:
        """Conclude a step that an earlier life of the program has published and not concluded."""
        first = next_iteration(self._store) if holds_run(self._store) else 0
        if self.step > first:
            self._conclude(first)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()
        if self._holds_lease:
            release_lease(self._store, self._execution)
            self._holds_lease = False

    def submit(self, step: int, prompts: Sequence[Any]) -> None:
        """Plan a step with these prompts, one group for each; members begin at once.

        With data.source "submitted" each step is planned so, and before its `next`. Giving a step the same prompts
        again does nothing.

        Args:
            step: At most algorithm.max_staleness steps after the first unpublished one.
            prompts: Each is text, a list of chat messages, or a mapping with `prompt` and columns for the rewards.

        Raises:
            PromptError: A prompt cannot be used; names it by its number.
            WrongStep: The step cannot be planned now, or has other prompts.
            RunBusy: Another process advances the run.
        """
        if self._config.data.source != SUBMITTED:
            raise WrongStep(f"data.source: value {self._config.data.source!r}; allowed for submit: {SUBMITTED!r}")
        given = SubmittedPrompts(prompts)
        if not holds_run(self._store) or step >= next_iteration(self._store):
            self._plan(step, given)
        held = [row.prompt_id for row in prompt_table.read_prompts(self._store, read_plan(self._store, step))]
        if held != [prompt.id for prompt in given]:
            raise WrongStep(f"step {step} is planned with other prompts; allowed: the {len(held)} prompts it has")

    def next(self, step: int) -> Iterator[Group]:
        """The groups of a step as they finish, in the recorded order, which every later call repeats.

        Args:
            step: An earlier step, whose groups are read again, or the first unpublished one.

        Raises:
            WrongStep: The run cannot take the step now.
            GroupTimeout: The journal has not grown for trainer.group_timeout_s.
            GradingError, CorruptObject, RunBusy: As for the train task.
        """
        if not holds_run(self._store) or step >= next_iteration(self._store):
            if self._config.data.source != SUBMITTED:
                for planned in range(step, step + self._config.algorithm.max_staleness + 1):
                    self._plan(planned, None)
            elif not self._holds_lease or not exists(self._store, layout.plan(step)):
                raise WrongStep(f"step {step}: value of next; allowed with data.source {SUBMITTED!r}: after its submit")
        self._step, self._began_at_s, self._waited_s = step, self._clock.wall(), 0.0
        return self._groups(read_plan(self._store, step))

    def publish(
        self,
        tensors: Mapping[str, Any] | str | Path,
        metrics: Mapping[str, float] | None = None,
        *,
        step: int | None = None,
    ) -> bool:
        """Publish the weights after a step as the next version, and conclude the step.

        Returns False if other weights were published first, by an earlier life of this program: members go on from
        those, and `Run.model` reads them.

        Args:
            tensors: A folder in transformers' format, or torch tensors or arrays by their names in version 0.
            metrics: Numbers for the report, such as {"loss": 0.3}.
            step: None: that of the last `next`.

        Raises:
            WrongStep: No step is under way, or some of its groups were not handed out.
            WeightsMisfit: A tensor is missing, unknown, or of another shape or dtype.
        """
        step = self._step if step is None else step
        if step is None or not exists(self._store, layout.closed(step)):
            raise WrongStep(
                "publish: no step is under way" if step is None else f"publish: step {step} has groups to come"
            )
        blocks = handed_blocks(tensors, read_manifest(self._store, layout.weights(0)))
        if not exists(self._store, layout.report(step)):
            self._record(step, metrics or {})
        is_own = self._publish(step + 1, blocks)
        self._conclude(step)
        self._step = None
        return is_own

    def _plan(self, step: int, submitted: SubmittedPrompts | None) -> None:
        """Plan a step, or find its plan."""
        first = next_iteration(self._store) if holds_run(self._store) else 0
        ahead = self._config.algorithm.max_staleness
        if not first <= step <= first + ahead or (step > first and not exists(self._store, layout.plan(step - 1))):
            raise WrongStep(
                f"step: value {step}; allowed now: {first}" + (f" to {first + ahead}, in order" if ahead else "")
            )
        prepare(self._config, self._execution, self._clock, ahead=step - first, submitted=submitted)
        if not self._holds_lease:
            self._holds_lease = True
            ttl_s = self._config.run.lease_ttl_s
            self._stack.enter_context(keep_lease(self._store, self._execution, ttl_s, self._clock))

    def _groups(self, plan: PlanRecord) -> Iterator[Group]:
        store, clock = self._store, self._clock
        config = config_in_force(store, plan)
        watch = CrewWatch(store, plan, config.rollout, config.planning, clock, execution=self._execution)
        prompts = prompt_table.read_prompts(store, plan)
        with ExitStack() as stack:
            folder = stack.enter_context(model_files.downloaded(store))
            decode = open_completion_decoder(folder, plan.sampling)
            batches: Batches
            if exists(store, layout.closed(plan.iteration)):
                batches = ReplayedBatches(store, plan)
            else:
                opened = opened_batches(store, plan, config, prompts, folder, clock, watch.check)
                batches = stack.enter_context(opened)
            for batch in batches:
                self._waited_s = batches.waited_s
                yield from groups_of(batch, plan, prompts, batches, decode)

    def _record(self, step: int, metrics: Mapping[str, float]) -> None:
        """Commit the training record; the record of an earlier life of the program stays."""
        now_s = self._clock.wall()
        requests = self._store.requests
        record = TrainingRecord(
            iteration=step,
            weight_version=step + 1,
            metrics={name: float(value) for name, value in metrics.items()}
            | {
                "timing_s/wait": self._waited_s,
                "requests/train_puts": float(requests.puts),
                "requests/train_gets": float(requests.gets),
            },
            reward_errors=(),
            started_at_s=self._began_at_s,
            ended_at_s=max(now_s, self._began_at_s),
        )
        records.commit(self._store, layout.training(step), record)

    def _publish(self, version: int, blocks: dict[str, TensorBlock]) -> bool:
        store: ObjectStore = self._store
        if exists(store, layout.report(version - 1)) and not exists(store, layout.manifest(layout.weights(version))):
            log.info("weight version %d was published, and deleted since", version)
            return False
        if self._base is None or self._base[0] != version - 1:
            # A program that was started again reads the version before once.
            self._base = (version - 1, pull_version(store, version - 1, None, self._clock)[1])
        try:
            publish_version(
                *(store, version, blocks, SOURCE),
                base=self._base[1],
                full_interval=WEIGHTS_FULL_INTERVAL,
                before_manifest=lambda: {PUBLISHED_AT_S: self._clock.wall()},
            )
        except ConflictingRecord as error:
            log.warning("weight version %d was published earlier with other weights, which stay: %s", version, error)
            self._base = None
            return False
        self._base = (version, blocks)
        return True

    def _conclude(self, step: int) -> None:
        if exists(self._store, layout.report(step)):
            return
        plan = read_plan(self._store, step)
        reference = PlanReference(
            run_url=self._config.run.url,
            iteration=step,
            weight_version=plan.weight_version,
            execution=self._execution,
        )
        outcome, _ = commit_and_report(reference, last=False)
        log.info("committed: %s", outcome.measured)


def rollouts(config: Mapping[str, Any] | str | Path) -> Rollouts:
    """The rollouts of the run that a configuration describes, for a program that trains; see `Rollouts`.

    config: A YAML or JSON file, or an equivalent mapping, with trainer.placement "external". Raises ConfigError.
    """
    return Rollouts(parse(config) if isinstance(config, Mapping) else load(config))
