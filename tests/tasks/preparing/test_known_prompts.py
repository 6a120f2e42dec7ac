"""Prompts with what another run knows of them: the choice by pass rates, learned lengths, kills, and refusals."""

import json
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest

from storage.clock import ManualClock
from storage.journal.compaction import read_responses
from storage.records import layout
from storage.records.length_tables import PREDICTORS, encode_lengths, known_lengths, newest_lengths
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan, read_run
from storage.stores.store import CorruptObject
from tasks.configuration.data import DataConfig
from tasks.configuration.run_config import ConfigError, digest, dump, parse
from tasks.evaluation.measure import evaluation_of
from tasks.planning.prompt_features import prompt_digest
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tasks.preparing.known_prompts import KnownPromptsError, find_known
from tasks.prompts.loading import load_prompts
from tasks.viewing.run_summary import run_facts
from tests.dying_store import DiesAtWrite, Killed
from tests.regraded_run import holding, trained, without_rewards
from tests.small_run import (
    EXECUTION,
    OWN_REWARD,
    commit_iteration,
    config,
    everything,
    memory_store,
    plan_iteration,
    roll_out,
    train_small,
)

OTHER, URL = "memory://known-other", "memory://known"
SIZE, ITERATIONS = 10, 3
SOURCE = {"source": "arithmetic", "limit": SIZE}
BOUNDS = [0.2, 0.8]


@pytest.fixture(scope="module")
def objects(model):
    """A run of three iterations of 4 of 10 prompts, with rewards of 0 and 1."""
    return trained("known-other", model, ITERATIONS, rewards=OWN_REWARD)


@pytest.fixture
def other(objects):
    return holding(objects, "known-other")


def settings(model, **data):
    return config(URL, model, rewards=OWN_REWARD, data=SOURCE | {"from": OTHER} | data)


def rates(store, iterations):
    """The pass rate of each prompt by its id, from the stored responses."""
    found = defaultdict(list)
    for iteration in iterations:
        for row in read_responses(store, iteration):
            found[row.prompt_id].append(row.reward >= 1)
    return {prompt: sum(passed) / len(passed) for prompt, passed in found.items()}


def drawn(store, iteration):
    return [row.prompt_id for row in read_prompts(store, read_plan(store, iteration))]


def test_only_prompts_within_the_bounds_are_kept_with_those_that_were_never_seen(model, other):
    store = memory_store("known")
    known = rates(other, range(2))
    assert 0 < len(known) < SIZE
    plan_iteration(settings(model, **{"from": f"{OTHER}@:2"}, pass_rate=BOUNDS))
    low, high = BOUNDS
    kept = [str(row) for row in range(SIZE) if str(row) not in known or low <= known[str(row)] <= high]
    assert kept != [str(row) for row in range(SIZE)]
    origin, plan = read_run(store).prompts_origin, read_plan(store, 0)
    assert (origin.url, origin.first, origin.stop, origin.prompts, origin.seen) == (OTHER, 0, 2, SIZE, len(known))
    assert (origin.below, origin.above) == (
        sum(rate < low for rate in known.values()),
        sum(rate > high for rate in known.values()),
    )
    assert run_facts(read_run(store))["prompts"] == origin.text
    assert set(drawn(store, 0)) <= set(kept)
    assert json.loads(store.get(layout.kept_prompts(origin.kept)))["body"]["rows"] == [int(row) for row in kept]
    assert plan.first_prompt == 0
    assert everything(other) == everything(holding(everything(other), "known-other"))


def test_a_whole_epoch_of_the_kept_prompts_is_drawn_before_one_comes_again(model, other):
    store = memory_store("known")
    known = rates(other, range(ITERATIONS))
    low, high = BOUNDS
    kept = {str(row) for row in range(SIZE) if str(row) not in known or low <= known[str(row)] <= high}
    given = settings(model, pass_rate=BOUNDS)
    found = []
    for iteration in range(2):
        plan_iteration(given)
        found += drawn(store, iteration)
        roll_out(URL, iteration)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
        # The other run is needed once.
        memory_store("known-other")
    assert set(found[: len(kept)]) == kept


def test_every_prompt_stays_without_bounds_and_lengths_feed_the_first_plan(model, other):
    """The history there found all long groups, so that the plan believes it."""
    recall = np.full_like(newest_lengths(other, ITERATIONS).recall, np.nan)
    recall[PREDICTORS.index("history"), -1] = 1.0
    theirs = replace(newest_lengths(other, ITERATIONS), recall=recall)
    other.put(layout.lengths(ITERATIONS - 1), encode_lengths(theirs))
    store = memory_store("known")
    plan_iteration(settings(model))
    origin, plan, ours = read_run(store).prompts_origin, read_plan(store, 0), known_lengths(store)
    assert (origin.kept, origin.below, origin.above) == (None, 0, 0)
    assert ours.learned == theirs.learned
    assert np.array_equal(ours.prompts, theirs.prompts)
    assert np.array_equal(ours.mean, theirs.mean)
    assert not ours.last_seen.any()
    means = dict(zip(theirs.prompts.tolist(), theirs.mean.tolist(), strict=True))
    assert plan.lengths.predictor == "history"
    assert list(plan.lengths.expected) == pytest.approx([means[prompt_digest(each)] for each in drawn(store, 0)])
    roll_out(URL, 0)
    train_small(URL, 0)
    commit_iteration(URL, 0)
    learned = newest_lengths(store, 1)
    assert learned.learned == theirs.learned + 1
    assert set(theirs.prompts) <= set(learned.prompts)


def test_without_another_run_the_first_plan_expects_nothing(model):
    store = memory_store("known")
    plan_iteration(config(URL, model, rewards=OWN_REWARD, planning={"length_predictor": "history"}))
    assert read_plan(store, 0).lengths is None


def test_prompts_are_known_by_their_text_wherever_they_stand(model, other, tmp_path):
    rows = list(load_prompts(DataConfig(**SOURCE)))
    file = tmp_path / "rows.jsonl"
    new = {"prompt": "never seen", "answer": "0"}
    body = [{"prompt": row.text_or_messages, **row.columns} for row in reversed(rows)]
    file.write_text("".join(json.dumps(row) + "\n" for row in [new | body[0] | {"prompt": "new"}, *body]))
    data = DataConfig(source=str(file), from_=OTHER, pass_rate=tuple(BOUNDS))
    known, plain = find_known(data, load_prompts(data)), rates(other, range(ITERATIONS))
    low, high = BOUNDS
    expected = [0, *(SIZE - row for row in reversed(range(SIZE)) if low <= plain.get(str(row), low) <= high)]
    assert list(known.rows) == sorted(expected)
    theirs = newest_lengths(other, ITERATIONS)
    means = dict(zip(theirs.prompts.tolist(), theirs.mean.tolist(), strict=True))
    ours = dict(zip(known.lengths.prompts.tolist(), known.lengths.mean.tolist(), strict=True))
    assert len(ours) == len(plain)
    for row in plain:
        assert ours[prompt_digest(str(SIZE - int(row)))] == means[prompt_digest(row)]


def test_killed_at_any_write_a_run_keeps_the_same_prompts(model, other):
    given = settings(model, pass_rate=BOUNDS)
    store = memory_store("known", DiesAtWrite("known", {}))
    plan_iteration(given)
    whole, expected = store.written.index(layout.plan(0)) + 1, (read_run(store).prompts_origin, drawn(store, 0))
    written = {key for key in everything(store) if key.startswith(layout.KNOWN)}
    assert len(written) == 2
    for writes in range(whole):
        store = memory_store("known", DiesAtWrite("known", {}, writes))
        with pytest.raises(Killed):
            prepare(given, EXECUTION, ManualClock())
        store.left = 1 << 30
        plan_iteration(given)
        assert (read_run(store).prompts_origin, drawn(store, 0)) == expected, writes


def test_check_says_how_many_prompts_are_known_and_kept(model, other):
    memory_store("known")
    [line] = [each for each in check_files(settings(model, pass_rate=BOUNDS)) if each.startswith("data.from: ")]
    assert line.startswith(f"data.from: {SIZE} prompts, {len(rates(other, range(ITERATIONS)))} of them seen in ")
    assert f"of {OTHER}, " in line
    assert line.endswith("data.pass_rate are left out; with learned lengths")


REFUSED = [
    ({"from": "memory://known-nothing"}, r"data\.from: value .*; memory://known-nothing holds no run$"),
    ({"from": f"{OTHER}@5:9"}, r"data\.from: value .*; iterations: value '5:9'; allowed: the run has 0 to 2$"),
    ({"seed": 77}, r"data\.from: value .*; none of its \d+ prompts is in data\.source 'arithmetic'"),
]


@pytest.mark.parametrize(("data", "line"), REFUSED)
@pytest.mark.parametrize("look", [check_files, plan_iteration])
def test_a_run_that_knows_nothing_is_refused_before_anything_is_created(model, other, look, data, line):
    store = memory_store("known")
    with pytest.raises(KnownPromptsError, match=line):
        look(settings(model, **data))
    assert everything(store) == {}


def test_bounds_without_a_prompt_between_them_are_refused(model, other):
    memory_store("known")
    with pytest.raises(KnownPromptsError, match=r"data\.pass_rate: value \[0\.45, 0\.55\]; no prompt of 10 is left"):
        plan_iteration(settings(model, pass_rate=[0.45, 0.55]))


def test_a_run_that_grades_nothing_has_no_pass_rates(model, other):
    memory_store("known")
    without_rewards(other, 1)
    with pytest.raises(KnownPromptsError, match=r"data\.pass_rate: value .*; allowed with memory://.*: null, because"):
        plan_iteration(settings(model, pass_rate=BOUNDS))
    plan_iteration(settings(model))


def test_a_damaged_choice_is_refused(model, other):
    store = memory_store("known")
    plan_iteration(settings(model, pass_rate=BOUNDS))
    key = layout.kept_prompts(read_run(store).prompts_origin.kept)
    store.put(key, store.get(key).replace(b'"rows":[', b'"rows":[0,'))
    with pytest.raises(CorruptObject, match=key):
        plan_iteration(settings(model, pass_rate=BOUNDS))


@pytest.mark.parametrize(
    ("data", "line"),
    [
        ({"from": None, "pass_rate": BOUNDS}, r"data\.pass_rate: value .*; allowed: .*, with data\.from"),
        ({"pass_rate": [0.9, 0.1]}, r"data\.pass_rate: value \[0\.9, 0\.1\]; allowed: the least and the greatest"),
        ({"pass_rate": [0.1, 1.5]}, r"data\.pass_rate\.1: 1\.5 given"),
        ({"from": URL}, r"data\.from: value .*; allowed: another run than run\.url"),
        ({"from": "ftp://x"}, r"data\.from: value 'ftp://x'; allowed: "),
    ],
)
def test_a_section_that_cannot_be_is_refused(model, data, line):
    with pytest.raises(ConfigError, match=line):
        settings(model, **data)


def test_held_out_prompts_are_not_chosen_and_other_runs_keep_their_names(model):
    with pytest.raises(ConfigError, match=r"evaluation\.data\.from: given; allowed: null"):
        config(URL, model, evaluation={"data": {"source": "arithmetic", "from": OTHER}})
    given = settings(model, pass_rate=BOUNDS)
    assert parse(dump(given)) == given
    plain = config(URL, model, rewards=OWN_REWARD, data=SOURCE)
    assert digest(given) != digest(plain)
    assert evaluation_of(given) == evaluation_of(plain)
