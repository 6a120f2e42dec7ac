"""Groups of other runs in an iteration (`data.replay`): the choice, and the responses in the run's own journal.

A stored response is a finished response, written by the plan task as a member would, with the log-probs of the sampler
that drew its tokens. The choice follows from the configuration and committed iterations alone, so every attempt chooses
alike. The responses are read and verified before the plan is written. The other runs are read alone.
"""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path

from storage.clock import Clock
from storage.errors import WrongInputError
from storage.journal.compaction import read_responses, recorded
from storage.journal.journal import PendingRows
from storage.journal.responses import Response
from storage.records import model_files
from storage.records.lineage import ReplayedGroup
from storage.records.prompt_table import PromptRow, read_prompts
from storage.records.records import CONTROL_POOL, PlanRecord, SlotPlan
from storage.records.run import connect_to_run, count_committed, num_drawn, read_plan, read_run
from storage.stores.store import CorruptObject, ObjectStore, StorageError
from tasks.configuration.origins import iterations_of
from tasks.configuration.run_config import RunConfig
from tasks.preparing.example_journal import Add, write_finished
from tasks.preparing.tools import TOKENIZER_FILES
from tasks.prompts.order import prompt_index
from tasks.reporting.export import parse_range
from tasks.sampling.engines.choose import context_length


class ReplayError(WrongInputError):
    """The stored responses of another run cannot be trained by this one."""


@dataclass(frozen=True)
class Replayed:
    """The groups of an iteration that are replayed, in the order of the plan.

    Attributes:
        sources: Where each group is stored.
        rows: The group's row of the prompt table.
        responses: The responses of each group, by sample, verified.
    """

    sources: tuple[ReplayedGroup, ...] = ()
    rows: tuple[PromptRow, ...] = ()
    responses: tuple[tuple[Response, ...], ...] = ()


NOTHING = Replayed()


def choose_replayed(
    config: RunConfig, counted: int, model_dir: Path, columns: Collection[str] = frozenset()
) -> Replayed:
    """The groups of other runs for the iteration with this counted number, read whole; NOTHING without `data.replay`.

    All groups of the named iterations stand in an order that run.seed and the number decide; the first that fit are
    taken: those whose responses are all recorded, none failed or too long. columns: what rewards need of a prompt.
    Raises ReplayError, in one line, also for a damaged run, and StoreUnavailable and StoreDenied.
    """
    replay = config.data.replay
    if replay is None:
        return NOTHING
    opened = [place for text in replay.runs for place in _Source.opened(text, config, model_dir).plans()]
    # Named twice, as by overlapping ranges, an iteration counts once.
    places = list({(source.store.url, plan.iteration): (source, plan) for source, plan in opened}.values())
    sizes = [plan.num_groups for _, plan in places]
    ends = list(accumulate(sizes))
    sources: list[ReplayedGroup] = []
    rows: list[PromptRow] = []
    wanted = replay.groups(config.run.num_prompts_per_step)
    for position in range(ends[-1]):
        _, number = prompt_index(counted * ends[-1] + position, ends[-1], config.run.seed, shuffle=True)
        at = next(index for index, end in enumerate(ends) if number < end)
        source, plan = places[at]
        group = number - (ends[at] - sizes[at])
        row = source.fitting(plan, group, config, model_dir)
        if row is None:
            continue
        _check_columns(row, columns, source.text)
        _check_teacher(row, config, source.text)
        sources.append(
            ReplayedGroup(
                url=source.store.url, iteration=plan.iteration, group=group, weight_version=plan.weight_version
            )
        )
        rows.append(row)
        if len(rows) == wanted:
            return Replayed(tuple(sources), tuple(rows), _read(sources))
    raise ReplayError(
        f"data.replay.runs: value {list(replay.runs)}; {len(rows)} of {ends[-1]} groups fit, and a step needs {wanted}"
    )


def slots_of_replayed(replayed: Replayed, first: int, slot: int) -> tuple[SlotPlan, ...]:
    """The slot of the plan task with the replayed groups, from the group `first` on; () without any."""
    groups = tuple(range(first, first + len(replayed.sources)))
    return (SlotPlan(slot=slot, pool=CONTROL_POOL, groups=groups),) if groups else ()


def write_replayed(store: ObjectStore, plan: PlanRecord, chosen: Replayed, clock: Clock) -> None:
    """Write the stored responses of a plan's replayed groups, bit for bit, unless an earlier attempt has.

    chosen: the groups with which this attempt wrote the plan. For a plan of an earlier attempt the other runs are read
    again; raises ReplayError then, as `choose_replayed` does, before any write.
    """
    if not plan.replayed:
        return
    size, first = plan.num_generations, num_drawn(plan)

    def adding() -> Add:
        stored = chosen.responses if chosen.sources == plan.replayed else _read(plan.replayed)

        def add(pending: PendingRows, response: int, epoch: int) -> int:
            row = stored[response // size - first][response % size]
            pending.append(response, epoch, 0, row.token_ids.tolist(), row.logprobs.tolist(), row.finish)
            return len(row.token_ids)

        return add

    write_finished(store, plan, plan.slots[-1].slot, adding, clock)


def _read(sources: Sequence[ReplayedGroup]) -> tuple[tuple[Response, ...], ...]:
    """The recorded responses of each group, verified; raises ReplayError, StoreUnavailable and StoreDenied."""
    wanted: dict[tuple[str, int], set[int]] = defaultdict(set)
    for source in sources:
        wanted[source.url, source.iteration].add(source.group)
    found: dict[tuple[str, int, int], tuple[Response, ...]] = {}
    for (url, iteration), groups in wanted.items():
        with _reading(url, iteration):
            for group, rows in _responses(connect_to_run(url), iteration, groups).items():
                found[url, iteration, group] = tuple(rows)
    return tuple(found[source.url, source.iteration, source.group] for source in sources)


@contextmanager
def _reading(url: str, iteration: int) -> Iterator[None]:
    """Raise ReplayError, which names the iteration, for a run that is gone or damaged."""
    try:
        yield
    except (CorruptObject, LookupError) as error:
        raise ReplayError(
            f"data.replay.runs: iteration {iteration} of {url}: {error}; allowed: iterations whose responses are "
            "stored whole"
        ) from None


def _responses(store: ObjectStore, iteration: int, groups: Collection[int]) -> dict[int, list[Response]]:
    """The recorded responses of groups, as `gleaner regrade` reads them; raises CorruptObject unless all are there."""
    plan = read_plan(store, iteration)
    size, named = plan.num_generations, recorded(store, plan)
    found: dict[int, list[Response]] = defaultdict(list)
    for row in read_responses(store, iteration):
        if row.response // size in groups:
            if (row.policy_length, row.reward) != (named[row.response].policy_length, named[row.response].reward):
                raise CorruptObject(store.url, f"response {row.response} of {iteration} is not what its batch says")
            found[row.response // size].append(row)
    if any(len(found[group]) != size for group in groups):
        raise CorruptObject(store.url, f"iteration {iteration} has not all responses of groups {sorted(groups)}")
    return found


@dataclass
class _Source:
    """Iterations of another run, as `data.replay.runs` names them."""

    text: str
    store: ObjectStore
    iterations: range
    _rows: dict[int, list[PromptRow]] = field(default_factory=dict)
    _whole: dict[int, dict[int, int]] = field(default_factory=dict)

    @classmethod
    def opened(cls, text: str, config: RunConfig, model_dir: Path) -> "_Source":
        """Raises ReplayError unless the run has the iterations, and this run can train its groups."""
        named, where = iterations_of(text), f"data.replay.runs: value {text!r}"
        try:
            store = connect_to_run(named.url)
            iterations = parse_range(named.iterations, count_committed(store))
        except StorageError:
            raise
        except (LookupError, ValueError) as error:
            raise ReplayError(f"{where}; {error}") from None
        theirs, ours = read_run(store).model_files, model_files.describe(model_dir)
        unlike = [name for name in TOKENIZER_FILES if theirs.get(name) != ours.get(name)]
        if unlike:
            raise ReplayError(f"{where}; its {unlike[0]} is another; allowed: a run with the tokenizer of this run")
        plan = read_plan(store, iterations[0])
        if not plan.is_sampled:
            raise ReplayError(f"{where}; its responses are examples; allowed: a run whose policy samples responses")
        if plan.num_generations != config.run.num_generations:
            raise ReplayError(
                f"{where}; its groups have {plan.num_generations} responses; allowed: {config.run.num_generations}, as "
                "run.num_generations says"
            )
        return cls(text, store, iterations)

    def plans(self) -> Iterator[tuple["_Source", PlanRecord]]:
        """The plan of each iteration."""
        for iteration in self.iterations:
            with _reading(self.store.url, iteration):
                plan = read_plan(self.store, iteration)
            yield self, plan

    def fitting(self, plan: PlanRecord, group: int, config: RunConfig, model_dir: Path) -> PromptRow | None:
        """The prompt of a group; None if a response failed, was not used, or is too long for this run.

        Groups that the run has from another run in turn are passed over.
        """
        if group >= num_drawn(plan):
            return None
        iteration = plan.iteration
        if iteration not in self._rows:
            with _reading(self.store.url, iteration):
                self._rows[iteration], graded_by_number = read_prompts(self.store, plan), recorded(self.store, plan)
            whole: dict[int, int] = {}
            for number, graded in graded_by_number.items():
                too_long = graded.length > config.sampling.max_completion_length or graded.length == 0
                if not too_long and graded.reward is not None and graded.length == graded.policy_length:
                    of = number // plan.num_generations
                    whole[of] = whole.get(of, 0) + 1
            self._whole[iteration] = whole
        row = self._rows[iteration][group]
        room = context_length(config.rollout, model_dir) - config.sampling.max_completion_length
        fits = self._whole[iteration].get(group) == plan.num_generations and len(row.token_ids) <= room
        return row if fits and row.opening is None else None


def _check_columns(row: PromptRow, columns: Collection[str], text: str) -> None:
    missing = sorted(set(columns) - row.columns.keys())
    if missing:
        raise ReplayError(
            f"data.replay.runs: value {text!r}; its prompt {row.prompt_id!r} has no column {missing[0]!r}, which "
            "data.source has"
        )


def _check_teacher(row: PromptRow, config: RunConfig, text: str) -> None:
    """Raise ReplayError for a prompt without a teacher, which training would find after the rollout."""
    try:
        if config.teacher is not None:
            config.teacher.teacher_of(row.columns)
    except ValueError as error:
        raise ReplayError(f"data.replay.runs: value {text!r}; its prompt {row.prompt_id!r}: {error}") from None
