"""Stored groups of other runs in a run's iterations: their bits, the correction, kills, and refusals."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from storage.clock import ManualClock
from storage.journal.compaction import read_responses
from storage.journal.retention import settle
from storage.journal.shard import decode_shard, encode_shard
from storage.records import layout, records
from storage.records.prompt_table import read_prompts
from storage.records.records import TrainingRecord
from storage.records.run import num_drawn, read_plan
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.run_config import ConfigError, digest, dump, parse
from tasks.preparing.checks import check_files
from tasks.preparing.iteration import prepare
from tasks.preparing.replayed_groups import ReplayError, choose_replayed
from tasks.sampling.session.standing import slot_in
from tests.dying_store import DiesAtWrite, Killed
from tests.regraded_run import holding
from tests.small_run import (
    EXECUTION,
    commit_iteration,
    document,
    everything,
    learned,
    memory_store,
    plan_iteration,
    roll_out,
    same,
    train_small,
    weights,
)

OTHER, URL = "memory://replay-other", "memory://replay"
ITERATIONS, GROUPS, SIZE = 3, 4, 3
ENGINE = {"engine": "torch", "context_length": 240}
SOURCE = {"source": "arithmetic", "limit": 10}
# Differs in nearly every group, also where all responses are cut at the limit.
BY_TEXT = [{"function": "tests.reward_functions:characters", "weight": 0.1}]
REPLAY = {"runs": [f"{OTHER}@1:3"], "share": 0.5}


def settings(url, model, **sections):
    run = {"url": url, "seed": 3, "num_prompts_per_step": GROUPS, "num_generations": SIZE} | sections.pop("run", {})
    return parse(document(url, model, run=run, **{"rollout": ENGINE} | sections))


def replaying(model, replay=REPLAY, **sections):
    return settings(URL, model, data=SOURCE | {"replay": replay}, **sections)


def go_on(config, iteration):
    plan_iteration(config)
    roll_out(config.run.url, iteration)
    record = train_small(config.run.url, iteration)
    commit_iteration(config.run.url, iteration)
    return record


@pytest.fixture(scope="module")
def objects(model):
    """A run of three iterations with another seed, so that its policy is another after a step."""
    store = memory_store("replay-other")
    for iteration in range(ITERATIONS):
        go_on(settings(OTHER, model, run={"seed": 8}, data=SOURCE | {"seed": 0}), iteration)
    settle(store, 1)
    return everything(store)


@pytest.fixture
def other(objects):
    return holding(objects, "replay-other")


def rows_of(store, iteration):
    return {row.response: row for row in read_responses(store, iteration)}


def test_replayed_groups_have_the_tokens_and_log_probs_of_their_sampler_bit_for_bit(model, other):
    store = memory_store("replay")
    before = everything(other)
    config = replaying(model)
    for iteration in range(2):
        go_on(config, iteration)
        plan = read_plan(store, iteration)
        assert (num_drawn(plan), plan.num_groups, len(plan.replayed)) == (2, GROUPS, 2)
        prompts, ours = read_prompts(store, plan), rows_of(store, iteration)
        for group, source in enumerate(plan.replayed, start=2):
            assert (source.url, source.iteration in (1, 2)) == (OTHER, True)
            theirs = read_plan(other, source.iteration)
            assert source.weight_version == theirs.weight_version
            assert prompts[group] == read_prompts(other, theirs)[source.group]
            stored = rows_of(other, source.iteration)
            for sample in range(SIZE):
                ours_row, row = ours[group * SIZE + sample], stored[source.group * SIZE + sample]
                assert ours_row.token_ids.tolist() == row.token_ids.tolist()
                assert ours_row.logprobs.tobytes() == row.logprobs.tobytes()
                assert (ours_row.finish, ours_row.reward) == (row.finish, row.reward)
    assert read_plan(store, 1).first_prompt == 2
    assert everything(other) == before


def test_the_choice_is_the_same_every_time_and_another_in_each_iteration(model, other):
    chosen = []
    for _ in range(2):
        store = memory_store("replay")
        go_on(replaying(model), 0)
        plan_iteration(replaying(model))
        chosen.append([read_plan(store, iteration).replayed for iteration in range(2)])
    assert chosen[0] == chosen[1]
    assert chosen[0][0] != chosen[0][1]
    assert len(set(chosen[0][0])) == 2


def test_a_group_that_is_named_twice_stands_once_in_a_step(model, other):
    runs = [f"{OTHER}@1:2", f"{OTHER}@1:2", f"{OTHER}@:2"]
    store = memory_store("replay")
    plan_iteration(replaying(model, {"runs": runs, "share": 0.75}))
    replayed = read_plan(store, 0).replayed
    assert len({(each.iteration, each.group) for each in replayed}) == len(replayed) == 3


def test_the_loss_is_corrected_by_the_log_probs_of_the_sampler(model, other):
    """The trainer's own log-probs in their place would give weights of one, and another gradient.

    Adam's first step hardly depends on the size of the gradient, so moments are compared.
    """
    store = memory_store("replay")
    plan_iteration(replaying(model, rewards=BY_TEXT))
    roll_out(URL, 0)
    planned = everything(store)
    metrics = train_small(URL, 0).metrics
    assert abs(metrics["importance/weight_mean"] - 1) > 1e-4
    corrected = moments(store)
    # What the bug would do: the log-probs of this policy, as its own engine would have recorded them.
    store = memory_store("replay", DiesAtWrite("replay", planned))
    plan = read_plan(store, 0)
    own = own_logprobs(store, plan, model)
    replace_logprobs(store, plan, own)
    metrics = train_small(URL, 0).metrics
    assert metrics["importance/weight_mean"] == pytest.approx(1, abs=1e-4)
    assert moments(store) != corrected
    store = memory_store("replay", DiesAtWrite("replay", planned))
    train_small(URL, 0)
    assert moments(store) == corrected


def moments(store):
    return read_manifest(store, layout.checkpoint(1)).tensors


def own_logprobs(store, plan, model):
    """The log-probs that version 0 gives to the stored tokens, by transformers' model."""
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    prompts, found = read_prompts(store, plan), {}
    for row in read_responses(store, 0):
        prompt = prompts[row.group].token_ids
        ids = torch.tensor([[*prompt, *row.token_ids.tolist()]])
        with torch.no_grad():
            scores = policy(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        found[row.response] = scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy().astype(np.float32)
    return found


def replace_logprobs(store, plan, own):
    """Rewrite the shards of the plan task with other log-probs."""
    slot = plan.slots[-1].slot
    for key in store.list(layout.journal(0)):
        if key.startswith(f"{layout.journal(0)}{slot:05d}-"):
            rows = decode_shard(key, store.get(key))
            store.put(key, encode_shard([replace(row, logprobs=own[row.response]) for row in rows]))


def test_metrics_and_the_next_prompts_are_those_of_generated_groups_alone(model, other):
    store = memory_store("replay")
    plan_iteration(replaying(model))
    roll_out(URL, 0)
    train_small(URL, 0)
    report = commit_iteration(URL, 0)
    rows = rows_of(store, 0)
    assert len(rows) == len(report.rewards) == GROUPS * SIZE
    own = [row for row in rows.values() if row.group < 2]
    assert report.metrics["reward"] == pytest.approx(np.mean([row.reward for row in own]))
    assert report.metrics["num_tokens"] == sum(row.policy_length for row in own)
    assert report.next_prompt == 2


def test_no_member_is_started_for_stored_responses(model, other):
    store = memory_store("replay")
    _, slots = prepare(replaying(model), EXECUTION, ManualClock())
    plan = read_plan(store, 0)
    assert plan.slots[-1].groups == (2, 3)
    assert plan.slots[-1].slot not in slots[0]
    assert slot_in(store, plan, plan.slots[-1].slot) == len(plan.slots)
    assert slots == [[0, 1]]


def test_a_plan_killed_at_any_write_has_the_same_stored_responses(model, other):
    store = memory_store("replay", DiesAtWrite("replay", {}))
    plan_iteration(replaying(model))
    plan, expected = read_plan(store, 0), stored(store)
    assert len(expected) == 2 * SIZE
    first = store.written.index(layout.plan(0))
    for writes in range(first - 2, len(store.written)):
        store = memory_store("replay", DiesAtWrite("replay", {}, writes))
        with pytest.raises(Killed):
            prepare(replaying(model), EXECUTION, ManualClock())
        store.left = 1 << 30
        plan_iteration(replaying(model))
        assert (read_plan(store, 0).replayed, stored(store)) == (plan.replayed, expected), writes


def damage(store):
    """Flip a bit of every part of stored responses; returns the parts as they were."""
    bodies = {key: store.get(key) for each in range(ITERATIONS) for key in store.list(layout.responses_parts(each))}
    assert bodies
    for key, body in bodies.items():
        store.put(key, body[:-40] + bytes([body[-40] ^ 1]) + body[-39:])
    return bodies


@pytest.mark.parametrize("look", [check_files, plan_iteration])
def test_a_damaged_source_is_one_line_before_anything_of_the_iteration_is_written(model, other, look):
    store = memory_store("replay")
    plan_iteration(replaying(model))
    expected = read_plan(store, 0).replayed, stored(store)
    store = memory_store("replay")
    bodies = damage(other)
    line = (
        rf"^data\.replay\.runs: iteration [12] of {OTHER}: object '.*' is corrupt: .*; allowed: iterations whose resp"
    )
    with pytest.raises(ReplayError, match=line) as refused:
        look(replaying(model))
    assert "\n" not in str(refused.value)
    assert not store.list(layout.iteration(0))
    for key, body in bodies.items():
        other.put(key, body)
    plan_iteration(replaying(model))
    assert (read_plan(store, 0).replayed, stored(store)) == expected


def test_a_source_that_is_gone_after_the_plan_is_asked_for_only_while_responses_are_missing(model, other):
    kept, store = everything(other), memory_store("replay", DiesAtWrite("replay", {}))
    plan_iteration(replaying(model))
    expected = read_plan(store, 0), stored(store)
    memory_store("replay-other")
    plan_iteration(replaying(model))
    assert (read_plan(store, 0), stored(store)) == expected
    holding(kept, "replay-other")
    writes = store.written.index(layout.plan(0)) + 1
    store = memory_store("replay", DiesAtWrite("replay", {}, writes))
    with pytest.raises(Killed):
        prepare(replaying(model), EXECUTION, ManualClock())
    store.left = 1 << 30
    memory_store("replay-other")
    before = everything(store).keys()
    with pytest.raises(ReplayError, match=rf"data\.replay\.runs: .*{OTHER}.*no"):
        plan_iteration(replaying(model))
    # No claim of an attempt that can write nothing.
    assert not [key for key in everything(store).keys() - before if key.startswith(layout.iteration(0))]
    holding(kept, "replay-other")
    plan_iteration(replaying(model))
    assert (read_plan(store, 0).replayed, stored(store)) == (expected[0].replayed, expected[1])


def stored(store):
    rows = read_responses(store, 0)
    return [(row.response, row.token_ids.tolist(), row.logprobs.tobytes()) for row in rows]


@pytest.mark.slow
def test_training_killed_at_any_write_ends_with_the_same_bits_also_by_a_replay_of_batches(model, other):
    store = memory_store("replay")
    plan_iteration(replaying(model, trainer={"micro_batch_tokens_max": 320, "checkpoint_interval": 4}))
    roll_out(URL, 0)
    planned = everything(store)
    whole = memory_store("replay", DiesAtWrite("replay", planned))
    metrics = train_small(URL, 0).metrics
    for writes in range(len(whole.written)):
        store = memory_store("replay", DiesAtWrite("replay", planned, writes))
        with pytest.raises(Killed):
            train_small(URL, 0)
        store.left = 1 << 30
        # The other run is not needed any more.
        memory_store("replay-other")
        assert learned(train_small(URL, 0).metrics) == learned(metrics), writes
        assert same(weights(store, 1), weights(whole, 1)), writes
    holding(everything(other), "replay-other")
    commit_iteration(URL, 0)
    go_on(replaying(model, trainer={"micro_batch_tokens_max": 320, "checkpoint_interval": 4}), 1)
    replayed = records.read(store, TrainingRecord, layout.training(1)).metrics
    assert replayed["replay/iterations"] == 1
    assert replayed.get("replay/tensors_changed", 0) == 0


def test_check_says_what_is_replayed(model, other):
    memory_store("replay")
    line = f"data.replay: 2 of {GROUPS} groups in a step, from {OTHER}@1:3"
    assert line in check_files(replaying(model))


REFUSED = [
    ({"runs": ["memory://replay-nothing@0:1"]}, {}, r"data\.replay\.runs: value .*; memory://replay-nothing holds no"),
    ({"runs": [f"{OTHER}@2:9"]}, {}, r"data\.replay\.runs: value .*; iterations: value '2:9'; allowed: .* 0 to 2$"),
    ({}, {"run": {"num_generations": 2}}, r"its groups have 3 responses; allowed: 2, as run\.num_generations says$"),
    ({}, {"sampling": {"max_completion_length": 1}}, r"data\.replay\.runs: value .*; 0 of 8 groups fit, and a step"),
]


@pytest.mark.parametrize(("replay", "sections", "line"), REFUSED)
@pytest.mark.parametrize("look", [check_files, plan_iteration])
def test_what_cannot_be_trained_is_refused_in_one_line(model, other, look, replay, sections, line):
    store = memory_store("replay")
    with pytest.raises(ReplayError, match=line) as refused:
        look(replaying(model, REPLAY | replay, **sections))
    assert "\n" not in str(refused.value)
    assert not store.list(layout.iteration(0))


def test_a_stored_prompt_without_a_teacher_is_refused_before_the_rollout(model, other):
    teacher = {"paths": {"strict": str(model)}, "column": "worked"}
    with pytest.raises(ReplayError, match=r"its prompt '.*': data: column 'worked': value .* allowed .*: 'strict'$"):
        choose_replayed(replaying(model, teacher=teacher), 0, model)


def test_log_probs_of_examples_are_no_samplers(model, other):
    plan = read_plan(other, 1)
    of_examples = plan.config | {"algorithm": plan.config["algorithm"] | {"kind": "dpo"}}
    records.put(other, layout.plan(1), replace(plan, config=of_examples))
    store = memory_store("replay")
    with pytest.raises(ReplayError, match="its responses are examples; allowed: a run whose policy samples responses"):
        plan_iteration(replaying(model))
    assert not store.list(layout.iteration(0))


CLASHES = [
    ({"algorithm": {"importance_sampling": "none"}}, r"data\.replay: given; allowed with algorithm\.importance_sampl"),
    ({"algorithm": {"filter_groups": True}}, r"data\.replay: given; allowed with algorithm\.filter_groups: null"),
    ({"run": {"url": OTHER}}, r"data\.replay\.runs: value .*; allowed: other runs than run\.url"),
    ({"run": {"num_prompts_per_step": 1}}, r"data\.replay\.share: value 0\.5, 0 groups of run\.num_prompts_per_step"),
    ({"turns": {"tools": ["tests.tool_functions:add"]}}, r"data\.replay: given; allowed with turns: null"),
    ({"evaluation": {"data": {"replay": REPLAY}}}, r"evaluation\.data\.replay: given; allowed: null"),
]


@pytest.mark.parametrize(("sections", "line"), CLASHES)
def test_a_configuration_whose_loss_cannot_correct_is_refused(model, sections, line):
    with pytest.raises(ConfigError, match=line):
        replaying(model, **sections)


@pytest.mark.parametrize(
    ("replay", "line"),
    [
        ({"runs": []}, r"data\.replay\.runs: \[\] given"),
        ({"runs": [OTHER]}, r"data\.replay\.runs: value .*; allowed: <url>@<a>:<b> with b"),
        ({"runs": [f"{OTHER}@1:"]}, r"data\.replay\.runs: value .*; allowed: <url>@<a>:<b> with b"),
        ({"runs": [f"{OTHER}@1:2"], "share": 1.0}, r"data\.replay\.share: 1 given"),
    ],
)
def test_a_section_that_cannot_be_is_refused(model, replay, line):
    with pytest.raises(ConfigError, match=line):
        replaying(model, replay)


def test_a_run_of_examples_replays_nothing_and_other_runs_keep_their_names(model):
    given = document(URL, model, algorithm={"kind": "sft"}, data=SOURCE | {"replay": REPLAY})
    del given["rewards"], given["run"]["num_generations"]
    with pytest.raises(ConfigError, match=r"data\.replay: given; allowed with algorithm\.kind 'sft': null"):
        parse(given)
    plain, replays = settings(URL, model, data=SOURCE), replaying(model)
    assert parse(dump(replays)) == replays
    assert digest(plain) != digest(replays)
