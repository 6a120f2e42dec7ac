"""Selecting responses of other runs as examples: by the batches first, and then by their tokens, all of it verified.

The first plan of a run selects, and the run keeps the tokens. A later change of the source runs changes nothing.
Order and choice follow from the stored runs alone.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from storage.digests import digest_of
from storage.journal.compaction import recorded
from storage.journal.recorded_responses import recorded_responses
from storage.records.gradings import read_graded
from storage.records.prompt_table import PromptRow, read_prompts
from storage.records.records import GradedResponse, PlanRecord
from storage.records.run import connect_to_run, count_committed, read_plan
from storage.stores.store import ObjectStore
from tasks.configuration.data import DataConfig
from tasks.configuration.origins import iterations_of
from tasks.configuration.run_selection import SelectConfig
from tasks.prompts.prompt import PromptError
from tasks.prompts.run_examples import RunExample, encode
from tasks.reporting.export import parse_range

# Of a file, in tokens: some 8 MB.
PIECE_TOKENS = 1 << 22


@dataclass(frozen=True, slots=True)
class _Chosen:
    """An example: the run by its place in data.runs, its responses with their rewards, and its prompt by digest."""

    run: int
    iteration: int
    responses: tuple[int, ...]
    rewards: tuple[float, ...]
    prompt: str

    @property
    def order(self) -> tuple[int, int, tuple[int, ...]]:
        return self.run, self.iteration, self.responses

    @property
    def worth(self) -> float:
        """The reward, or the difference of a pair."""
        return self.rewards[0] - (self.rewards[1] if len(self.rewards) > 1 else 0.0)


def selected(data: DataConfig, kind: str) -> list[bytes]:
    """The examples that `data.runs` and `data.select` name, as files of `run_examples.encode`.

    Takes the memory of an iteration, and of the compressed examples. kind: "sft", or "dpo" for the best and the worst
    response of each group. Raises PromptError for a run that is not there or has no rewards, and if nothing fits;
    CorruptObject for a damaged run, and LookupError for a grading that is not there.
    """
    select = data.select or SelectConfig()
    stores: list[ObjectStore] = []
    found: list[_Chosen] = []
    for number, text in enumerate(data.runs):
        store, iterations = _opened(text)
        stores.append(store)
        for iteration in iterations:
            plan = read_plan(store, iteration)
            _check_offers(plan, text, select, kind)
            found += _candidates(store, plan, number, select, pairs=kind == "dpo")
    kept = sorted(_first_of_each(found, select.per_prompt), key=lambda each: each.order)[: data.limit]
    if not kept:
        what = "pair of responses" if kind == "dpo" else "response"
        raise PromptError(f"data.select: no {what} of {', '.join(data.runs)} is selected; allowed: at least one")
    return list(_pieces(stores, data.runs, kept))


def _check_offers(plan: PlanRecord, text: str, select: SelectConfig, kind: str) -> None:
    """Raise PromptError for examples, and for responses without the rewards that the selection reads."""
    if not plan.is_sampled:
        raise PromptError(f"data.runs: value {text!r}, whose responses are examples; allowed: runs with rewards")
    reads_rewards = kind == "dpo" or select.reward is not None or select.per_prompt is not None
    if reads_rewards and not plan.is_graded and select.grading is None:
        raise PromptError(f"data.runs: value {text!r}, which has no rewards; allowed: a data.select.grading of it")


def _opened(text: str) -> tuple[ObjectStore, range]:
    named = iterations_of(text)
    try:
        store = connect_to_run(named.url)
        return store, parse_range(named.iterations, count_committed(store))
    except (LookupError, ValueError) as error:
        raise PromptError(f"data.runs: value {text!r}; {error}") from None


def _candidates(
    store: ObjectStore, plan: PlanRecord, run: int, select: SelectConfig, *, pairs: bool
) -> Iterator[_Chosen]:
    """What an iteration offers, by the records alone."""
    rewards = _rewards(store, plan, recorded(store, plan), select)
    prompts = [_prompt_digest(row) for row in read_prompts(store, plan)]
    low, high = select.reward or (-np.inf, np.inf)

    def chosen(*responses: int) -> _Chosen:
        prompt = prompts[responses[0] // plan.num_generations]
        return _Chosen(run, plan.iteration, responses, tuple(rewards[each] for each in responses), prompt)

    for _, group in groupby(sorted(rewards), key=lambda number: number // plan.num_generations):
        numbers = list(group)
        if not pairs:
            yield from (chosen(number) for number in numbers if low <= rewards[number] <= high)
            continue
        best = min(numbers, key=lambda number: (-rewards[number], number))
        worst = min(numbers, key=lambda number: (rewards[number], number))
        difference = rewards[best] - rewards[worst]
        if difference > 0 and difference >= select.margin and low <= rewards[best] <= high:
            yield chosen(best, worst)


def _rewards(
    store: ObjectStore, plan: PlanRecord, named: Mapping[int, GradedResponse], select: SelectConfig
) -> dict[int, float]:
    """The rewards of the responses that ended by themselves and are short enough, by number."""
    longest = np.inf if select.max_length is None else select.max_length
    fit = {number: each for number, each in named.items() if each.finish_reason == "stop" and each.length <= longest}
    if select.grading is None:
        return {number: each.reward for number, each in fit.items() if each.reward is not None}
    try:
        grading = read_graded(store, select.grading, plan.iteration)
    except LookupError as error:
        raise LookupError(f"data.select.{error}") from None
    graded = ((number, grading.reward_of(number)) for number in fit)
    return {number: reward for number, reward in graded if reward is not None}


def _prompt_digest(row: PromptRow) -> str:
    return digest_of(np.array(row.token_ids, dtype=np.uint32).tobytes())


def _first_of_each(found: Iterable[_Chosen], most: int | None) -> list[_Chosen]:
    """At most so many of each prompt: the best, and of equal ones the earliest."""
    if most is None:
        return list(found)
    by_prompt: dict[str, list[_Chosen]] = defaultdict(list)
    for each in found:
        by_prompt[each.prompt].append(each)
    return [
        each
        for group in by_prompt.values()
        for each in sorted(group, key=lambda each: (-each.worth, each.order))[:most]
    ]


def _pieces(stores: Sequence[ObjectStore], names: Sequence[str], kept: Sequence[_Chosen]) -> Iterator[bytes]:
    """The files of the examples, which are in order."""
    part: list[RunExample] = []
    tokens = 0
    for (run, iteration), group in groupby(kept, key=lambda each: (each.run, each.iteration)):
        plan = read_plan(stores[run], iteration)
        stored, prompts = recorded_responses(stores[run], plan), read_prompts(stores[run], plan)
        for each in group:
            row = prompts[each.responses[0] // plan.num_generations]
            rows = [stored[number] for number in each.responses]
            origin = {"run": names[run], "iteration": iteration, "responses": each.responses, "rewards": each.rewards}
            numbers = "-".join(map(str, each.responses))
            part.append(
                RunExample(
                    id=f"{run}.{iteration}.{numbers}",
                    token_ids=row.token_ids,
                    prompt=row.prompt,
                    columns=row.columns | {"from_run": origin},
                    responses=[response.token_ids.tolist() for response in rows],
                    origins=[response.origins for response in rows],
                )
            )
            tokens += sum(len(response.token_ids) for response in rows)
            if tokens >= PIECE_TOKENS:
                yield encode(part)
                part, tokens = [], 0
    if part:
        yield encode(part)
