"""Examples from the journals of other runs: which responses are taken, and that their tokens are learned."""

import pytest
from transformers import AutoTokenizer

from storage.journal.compaction import read_responses
from storage.journal.recorded_responses import recorded_responses
from storage.records import layout
from storage.records.prompt_table import read_prompts
from storage.records.run import read_plan, read_run
from storage.stores.store import CorruptObject
from tasks.configuration.data import DataConfig
from tasks.configuration.run_config import ConfigError, parse
from tasks.configuration.run_selection import SelectConfig
from tasks.preparing.checks import check_files
from tasks.preparing.run_selection import selected
from tasks.prompts.loading import load_prompts
from tasks.prompts.prompt import PromptError
from tasks.regrading.regrading import regrade
from tests.dying_store import DiesAtWrite, Killed
from tests.example_runs import URL
from tests.example_runs import config as examples_config
from tests.regraded_run import holding, trained, without_rewards
from tests.small_run import (
    commit_iteration,
    config,
    document,
    everything,
    memory_store,
    model_directory,
    plan_iteration,
    train_small,
)

SOURCE, ITERATIONS = "memory://source", 2
RUN = {"url": URL, "seed": 3, "num_prompts_per_step": 3, "num_generations": 8}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def objects(model):
    """A run of two iterations of four groups of three; the prompts of both are the same four."""
    return trained("source", model, ITERATIONS, data={"limit": 4})


@pytest.fixture
def source(objects):
    return holding(objects, "source")


def over(model, kind="sft", **data):
    """A run over the other run."""
    return examples_config(model, run=RUN, algorithm={"kind": kind}, data={"runs": [SOURCE], "limit": None} | data)


def chosen(tmp_path, kind="sft", **select):
    """(iteration, responses, rewards) of each example that is selected, and the examples."""
    runs = select.pop("runs", [SOURCE])
    limit = select.pop("limit", None)
    pieces = selected(DataConfig(runs=tuple(runs), limit=limit, select=SelectConfig(**select)), kind)
    found = []
    for number, piece in enumerate(pieces):
        file = tmp_path / f"{number}.parquet"
        file.write_bytes(piece)
        found += load_prompts(DataConfig(source=str(file)), kind=kind)
    origins = [prompt.columns["from_run"] for prompt in found]
    return [(each["iteration"], tuple(each["responses"]), tuple(each["rewards"])) for each in origins]


def known(store):
    """(iteration, response) -> the recorded response, of those that ended by themselves, and the prompts' tokens."""
    rows, asked = {}, {}
    for iteration in range(ITERATIONS):
        plan = read_plan(store, iteration)
        for number, row in recorded_responses(store, plan).items():
            if row.finish.name == "STOP":
                rows[iteration, number] = row
                asked[iteration, number] = read_prompts(store, plan)[row.group].token_ids
    return rows, asked


def test_every_response_that_ended_by_itself_is_an_example(tmp_path, source):
    rows, _ = known(source)
    assert len(rows) > 2
    assert chosen(tmp_path) == [(*key[:1], key[1:], (row.reward,)) for key, row in sorted(rows.items())]
    assert chosen(tmp_path, runs=[f"{SOURCE}@1:2"]) == [each for each in chosen(tmp_path) if each[0] == 1]
    assert chosen(tmp_path, limit=2) == chosen(tmp_path)[:2]
    assert len(chosen(tmp_path, runs=[SOURCE, SOURCE])) == 2 * len(rows)


def test_rewards_lengths_and_the_number_per_prompt_decide(tmp_path, source):
    rows, asked = known(source)
    rewards = sorted({row.reward for row in rows.values()})
    low, high = rewards[1], rewards[-2]
    within = chosen(tmp_path, reward=(low, high))
    assert [each[:2] for each in within] == [
        (iteration, (number,)) for (iteration, number), row in sorted(rows.items()) if low <= row.reward <= high
    ]
    assert 0 < len(within) < len(rows)
    short = chosen(tmp_path, max_length=22)
    assert [each[:2] for each in short] == [
        (iteration, (number,)) for (iteration, number), row in sorted(rows.items()) if len(row.token_ids) <= 22
    ]
    best = {}
    for key in sorted(rows, key=lambda key: (-rows[key].reward, key)):
        best.setdefault(asked[key], key)
    assert len(best) < len(rows)
    assert [(each[0], *each[1]) for each in chosen(tmp_path, per_prompt=1)] == sorted(best.values())


def test_pairs_are_the_best_and_the_worst_of_a_group(tmp_path, source):
    rows, _ = known(source)
    expected = {}
    for (iteration, number), row in sorted(rows.items()):
        group = expected.setdefault((iteration, number // 3), [])
        group.append((row.reward, -number))
    pairs = {
        key: (-max(group)[1], -max((-reward, number) for reward, number in group)[1], max(group)[0] - min(group)[0])
        for key, group in expected.items()
        if max(group)[0] > min(group)[0]
    }
    found = chosen(tmp_path, "dpo")
    assert [(iteration, *numbers) for iteration, numbers, _ in found] == [
        (iteration, best, worst) for (iteration, _), (best, worst, _) in sorted(pairs.items())
    ]
    assert all(better > worse for *_, (better, worse) in found)
    differences = sorted(difference for *_, difference in pairs.values())
    wide = chosen(tmp_path, "dpo", margin=differences[-1])
    assert [better - worse for *_, (better, worse) in wide] == [differences[-1]]


def test_a_grading_replaces_the_recorded_rewards(tmp_path, model, source):
    length = [{"function": "length", "arguments": {"free_tokens": 0, "scale_tokens": 40}, "weight": -1.0}]
    regrade(source, config(SOURCE, model, rewards=length), range(ITERATIONS), "longer")
    swapped = [(iteration, numbers[::-1]) for iteration, numbers, _ in chosen(tmp_path, "dpo")]
    graded = chosen(tmp_path, "dpo", grading="longer")
    assert {iteration for iteration, *_ in graded} == {0, 1}
    assert [each[:2] for each in graded] == swapped
    with pytest.raises(LookupError, match=r"^data\.select\.grading: value 'other'; allowed: longer"):
        chosen(tmp_path, grading="other")


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_the_run_learns_the_tokens_that_the_policy_sampled_and_needs_the_other_run_no_more(model, source, kind):
    before, settings = everything(source), over(model, kind, shuffle=False)
    store = memory_store("examples")
    plan_iteration(settings)
    assert everything(source) == before
    assert list(read_run(store).sources) == ["data.runs"]
    memory_store("source")
    rows, asked = known(holding(before, "source"))
    memory_store("source")
    for iteration in range(2):
        plan_iteration(settings)
        plan = read_plan(store, iteration)
        train_small(URL, iteration)
        commit_iteration(URL, iteration)
        learned = {row.response: row for row in read_responses(store, iteration)}
        for group, prompt in enumerate(read_prompts(store, plan)):
            origin = prompt.columns["from_run"]
            assert origin["run"] == SOURCE
            for place, number in enumerate(origin["responses"]):
                key = origin["iteration"], number
                row = learned[plan.num_generations * group + place]
                assert row.token_ids.tolist() == rows[key].token_ids.tolist()
                assert prompt.token_ids == asked[key]


def test_a_plan_killed_at_any_write_begins_with_the_same_examples(model, source):
    counting = memory_store("examples", DiesAtWrite("examples", {}))
    plan_iteration(over(model))
    expected = [read_prompts(counting, read_plan(counting, 0)), [row.token_ids.tolist() for row in _journal(counting)]]
    for writes in range(0, len(counting.written), 3):
        store = memory_store("examples", DiesAtWrite("examples", {}, writes))
        with pytest.raises(Killed):
            plan_iteration(over(model))
        store.left = 1 << 30
        plan_iteration(over(model))
        assert [
            read_prompts(store, read_plan(store, 0)),
            [row.token_ids.tolist() for row in _journal(store)],
        ] == expected


def _journal(store):
    return list(read_responses(store, 0))


def test_examples_of_runs_are_chosen_by_what_a_run_knows_of_their_prompts(model, source):
    learned = []
    for data in ({}, {"from": SOURCE, "pass_rate": [0.0, 0.5]}):
        store = memory_store("examples")
        check_files(over(model, **data))
        plan_iteration(over(model, **data))
        learned.append([row.token_ids.tolist() for row in _journal(store)])
    assert learned[0] == learned[1]


def test_damage_of_the_other_run_is_found(model, source):
    sound = everything(source)
    for part in ("/prompts", "/batches", "/journal/", "/plan.json"):
        store = memory_store("examples")
        key = next(key for key in sound if layout.iteration(1) in key and part in key)
        source._objects[key] = sound[key][:-8] + b"damaged!"
        with pytest.raises(CorruptObject, match=key):
            plan_iteration(over(model))
        assert everything(store) == {}
        source._objects[key] = sound[key]


def other_tokenizer(folder):
    model = model_directory(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.add_tokens(["<new>"])
    tokenizer.save_pretrained(model)
    return model


def test_a_run_of_another_tokenizer_is_refused_in_one_line(tmp_path, source):
    settings = over(other_tokenizer(tmp_path / "other"))
    memory_store("examples")
    for look in (plan_iteration, check_files):
        with pytest.raises(
            PromptError, match=r"^data\.runs: value 'memory://source', in whose tokenizer '<new>' is no"
        ):
            look(settings)


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        ({"runs": ["memory://nowhere"]}, "data.runs: value 'memory://nowhere'; memory://nowhere holds no run"),
        (
            {"runs": [f"{SOURCE}@1:3"]},
            "data.runs: value 'memory://source@1:3'; iterations: value '1:3'; allowed: the run has 0 to 1",
        ),
        (
            {"select": {"reward": [2, 3]}},
            "data.select: no response of memory://source is selected; allowed: at least one",
        ),
    ],
)
def test_what_gives_no_examples_is_refused_in_one_line(model, source, data, problem):
    memory_store("examples")
    memory_store("nowhere")
    for look in (plan_iteration, check_files):
        with pytest.raises(PromptError) as caught:
            look(over(model, **data))
        assert str(caught.value) == problem


@pytest.mark.parametrize(("kind", "select"), [("dpo", {}), ("sft", {"per_prompt": 1}), ("sft", {"reward": [0, 1]})])
def test_a_run_without_rewards_offers_all_its_responses_or_those_of_a_grading(model, source, kind, select):
    without_rewards(source, ITERATIONS)
    given = SelectConfig(**{name: tuple(value) if name == "reward" else value for name, value in select.items()})
    with pytest.raises(
        PromptError, match=r"^data\.runs: value 'memory://source', which has no rewards; allowed: a data"
    ):
        selected(DataConfig(runs=(SOURCE,), select=given), kind)
    assert selected(DataConfig(runs=(SOURCE,)), "sft")


def test_a_response_that_is_too_long_is_refused_by_name(model, source):
    memory_store("examples")
    short = {"max_completion_length": 20}
    settings = examples_config(model, run=RUN, sampling=short, data={"runs": [SOURCE], "limit": None})
    with pytest.raises(PromptError, match=r"^data\.runs, response 0\.\d\.\d+ has \d\d tokens; allowed: 20 .sampling\."):
        plan_iteration(settings)


def test_examples_of_examples_are_refused(model, source):
    memory_store("examples")
    plan_iteration(over(model))
    train_small(URL, 0)
    commit_iteration(URL, 0)
    with pytest.raises(PromptError, match=r"^data\.runs: value 'memory://examples', whose responses are examples"):
        selected(DataConfig(runs=(URL,)), "sft")


@pytest.mark.parametrize(
    ("sections", "problem"),
    [
        (
            {"data": {"runs": [SOURCE], "source": "rows.jsonl"}},
            'data.source: value "rows.jsonl"; allowed with data.runs: "arithmetic", because responses are read as tok',
        ),
        ({"data": {"runs": [URL]}}, "data.runs: value 'memory://examples'; allowed: other runs than run.url"),
        ({"data": {"runs": [f"{URL}/a@0:1"]}}, "data.runs: value 'memory://examples/a@0:1'; allowed: other runs"),
        ({"data": {"runs": ["ftp://a"]}}, "data.runs: value 'ftp://a'; allowed: a path, "),
        (
            {"data": {"runs": [SOURCE], "select": {"margin": 0.5}}},
            "data.select.margin: value 0.5; allowed without algorithm.kind 'dpo': 0.0",
        ),
        (
            {"data": {"runs": [SOURCE], "select": {"reward": [1, 0]}}},
            "data.select.reward: value [1.0, 0.0]; allowed: the least reward, then the greatest",
        ),
        ({"data": {"source": "rows.jsonl", "select": {"per_prompt": 1}}}, "data.select: given; allowed without data."),
    ],
)
def test_settings_that_clash_are_refused_in_one_line(sections, problem):
    whole = {"run": {"url": URL}, "policy": {"path": "model"}, "algorithm": {"kind": "sft"}}
    with pytest.raises(ConfigError) as caught:
        parse(whole | sections)
    [line] = caught.value.problems
    assert line.startswith(problem)


def test_a_policy_that_samples_takes_no_run(model):
    with pytest.raises(ConfigError, match=r"data\.runs: given; allowed with algorithm\.kind 'rl': nothing, because"):
        parse(document(URL, model) | {"data": {"runs": [SOURCE]}})
