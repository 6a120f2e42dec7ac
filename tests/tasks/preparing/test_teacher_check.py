"""Refusals of teachers before a run exists, by `check` and by the first plan, and the run's copy of a teacher."""

import json
from contextlib import nullcontext

import pytest

from storage.records import layout
from storage.stores.connect import connect
from storage.weights.tensor_sets import read_manifest
from tasks.configuration.run_config import parse
from tasks.learning.pretrained import ModelError
from tasks.preparing.checks import check_files
from tasks.preparing.engine_fit import EngineMisfit, check_scorer_fits
from tasks.preparing.iteration import prepare
from tasks.preparing.teacher_check import held_teachers
from tasks.prompts.vocabulary import read_vocabulary, vocabulary_digest
from tests.small_run import EXECUTION, document, memory_store, model_directory, plan_iteration
from tests.tiny_model import save_tiny_model, tiny_config, tiny_model

URL = "memory://teachers"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture
def teacher(tmp_path):
    return save_tiny_model(tmp_path / "teacher", tiny_model(tiny_config(), seed=4))


def config(model, teacher, **sections):
    memory_store("teachers")
    return parse(document(URL, model, teacher=teacher, **sections))


def refusals(settings):
    """What `check` and `plan` say; nothing is written by either."""
    lines = []
    for look in (check_files, lambda given: prepare(given, EXECUTION, None)):
        with pytest.raises(Exception) as caught:  # noqa: PT011 - the text is compared by the caller
            look(settings)
        lines.append(str(caught.value))
        assert connect(URL).list("") == []
    return lines


def change(teacher, file, edit):
    path = teacher / file
    document = json.loads(path.read_text())
    edit(document)
    path.write_text(json.dumps(document))


def test_a_teacher_too_large_for_the_trainers_gpus_is_refused_before_anything_is_written(model, teacher):
    change(teacher, "config.json", lambda document: document.update(num_hidden_layers=10_000_000))
    pools = {"train": {"machine": "p5.48xlarge", "gpus": 1}}
    for line in refusals(config(model, {"path": str(teacher)}, pools=pools)):
        assert "trainer.nproc_per_node: 1 processes on H100-80GB would hold" in line
        assert "of the section teacher; allowed: " in line


def swap_two(document):
    vocabulary = document["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def test_a_teacher_with_another_tokenizer_is_refused_by_a_line_that_names_both(model, teacher):
    change(teacher, "tokenizer.json", swap_two)
    for line in refusals(config(model, {"path": str(teacher)})):
        assert f"teacher.path: the tokenizer of {str(teacher)!r} is not that of policy.path ({str(model)!r})" in line
        assert "the first token that only one of them has: 'a' with id" in line


def test_equal_vocabularies_have_equal_digests_whatever_their_files_are(model, teacher):
    change(teacher, "tokenizer.json", lambda document: document.update(truncation=None))
    ours, theirs = (vocabulary_digest(read_vocabulary(folder)) for folder in (model, teacher))
    assert ours == theirs
    change(teacher, "tokenizer.json", swap_two)
    assert vocabulary_digest(read_vocabulary(teacher)) != ours


def test_a_missing_directory_and_an_unknown_family_are_refused_by_the_teachers_field(model, teacher):
    for line in refusals(config(model, {"paths": {"sums": "/nowhere"}, "column": "answer"})):
        assert "teacher.paths.sums: '/nowhere' does not exist" in line
    change(teacher, "config.json", lambda document: document.update(model_type="unheard_of"))
    for line in refusals(config(model, {"path": str(teacher)})):
        assert "teacher.path: " in line
        assert "'unheard_of'" in line


def test_a_teacher_with_fewer_tokens_or_too_few_positions_is_refused(tmp_path, model):
    fewer = save_tiny_model(tmp_path / "fewer", tiny_model(tiny_config(vocab_size=90)))
    for line in refusals(config(model, {"path": str(fewer)})):
        assert f"teacher.path: {str(fewer)!r} has vocab_size 90; allowed: at least that of policy.path (96)" in line
    short = save_tiny_model(tmp_path / "short", tiny_model(tiny_config(max_position_embeddings=40)))
    for line in refusals(config(model, {"path": str(short)})):
        assert f"teacher.path: {str(short)!r} reads at most 40 tokens; allowed: at least 41" in line


BY_VLLM = {"pool": "scorers", "engine": "vllm"}


def test_a_sequence_as_long_as_the_teachers_positions_is_refused_for_vllm_alone(model, teacher):
    """Both models have 256 positions."""
    pools = {"scoring": {"scorers": {}}}
    for line in refusals(config(model, {"path": str(teacher)} | BY_VLLM, pools=pools)):
        assert (
            f"teacher.path: {str(teacher)!r} reads at most 256 tokens, and a sequence may be as long; allowed with "
            "teacher.engine 'vllm': rollout.context_length up to 255"
        ) in line
    for given in (
        {"rollout": {"context_length": 255}},
        {"data": {"max_prompt_length": 215}, "sampling": {"max_completion_length": 40}},
    ):
        check_files(config(model, {"path": str(teacher)} | BY_VLLM, pools=pools, **given))
    check_files(config(model, {"path": str(teacher), "pool": "scorers"}, pools=pools))


def test_a_teacher_too_large_for_the_gpus_of_its_vllm_is_refused_before_anything_is_written(model, teacher):
    pools = {"scoring": {"scorers": {"machine": "p5.48xlarge", "gpus": 2}}}
    settings = BY_VLLM | {"vllm": {"tensor_parallel_size": 2, "gpu_memory_utilization": 1e-6}}
    for line in refusals(config(model, {"path": str(teacher)} | settings, pools=pools, rollout={"context_length": 99})):
        assert "teacher.path: pools.scoring.scorers: the weights take " in line
        assert "cache of one response of 100 tokens" in line
        assert "more than 2 x H100-80GB" in line
        assert "more GPUs of an engine (teacher.vllm.tensor_parallel_size, and as many gpus)" in line


def test_teachers_of_a_scorer_must_fit_its_gpus_together(model, teacher):
    """Each has 61e9 parameters, and takes 16 GB of cache for 60 tokens."""
    change(teacher, "config.json", lambda document: document.update(num_hidden_layers=2_000_000))
    both = {"paths": {"sums": str(teacher), "rest": str(teacher)}, "column": "answer"}
    for named, gpus, fits in (
        ({"path": str(teacher)}, 1, False),
        ({"path": str(teacher)}, 2, True),
        (both, 2, False),
        (both, 4, True),
    ):
        settings = named | BY_VLLM | {"vllm": {"tensor_parallel_size": gpus}}
        pools = {"scoring": {"scorers": {"machine": "p5.48xlarge", "gpus": gpus}}}
        given = config(model, settings, pools=pools, trainer={"dtype": "bfloat16"})
        with nullcontext() if fits else pytest.raises(EngineMisfit, match=r"the weights take 122\.9 GB"):
            check_scorer_fits(given, given.teacher, teacher, 60)


@pytest.mark.parametrize(("gigabytes", "fits"), [(9, True), (10, False)])
def test_caches_of_a_fixed_size_must_fit_beside_all_teachers(model, teacher, gigabytes, fits):
    """Beside the weights of 2 x 122.9 GB, 4 x 80 GB leave 2 x 4 x 9.3 GB."""
    change(teacher, "config.json", lambda document: document.update(num_hidden_layers=2_000_000))
    vllm = {"vllm": {"tensor_parallel_size": 4, "kv_cache_memory_bytes": gigabytes * 10**9}}
    both = {"paths": {"sums": str(teacher), "rest": str(teacher)}, "column": "answer"}
    pools = {"scoring": {"scorers": {"machine": "p5.48xlarge", "gpus": 4}}}
    given = config(model, both | BY_VLLM | vllm, pools=pools, trainer={"dtype": "bfloat16"})
    line = r"^teacher\.vllm\.kv_cache_memory_bytes: value 10000000000 .* 80\.0 GB beside 245\.8 GB of weights"
    with nullcontext() if fits else pytest.raises(EngineMisfit, match=line):
        check_scorer_fits(given, given.teacher, teacher, 60)


def test_a_prompt_without_a_teacher_is_refused_by_its_row(tmp_path, model, teacher):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"prompt": "1+1=", "subject": "sums"}\n{"prompt": "2+2=", "subject": "art"}\n')
    several = {"paths": {"sums": str(teacher)}, "column": "subject"}
    for line in refusals(config(model, several, data={"source": str(rows)})):
        assert "rows.jsonl" in line
        assert "column 'subject': value 'art'; allowed (teacher.paths): 'sums'" in line


def test_a_run_holds_its_teacher_and_goes_on_without_the_directory(model, teacher):
    settings = config(model, {"path": str(teacher)})
    assert "teacher: " in "\n".join(check_files(settings))
    plan_iteration(settings)
    store = connect(URL)
    manifest = read_manifest(store, layout.teacher("teacher"))
    assert manifest.metadata["config"]["num_hidden_layers"] == 2
    assert held_teachers(store, settings.teacher) == {"teacher"}
    for file in teacher.iterdir():
        file.unlink()
    teacher.rmdir()
    plan_iteration(settings)


def test_a_models_error_about_the_policy_still_names_the_policy(model, teacher):
    with pytest.raises(ModelError, match=r"policy\.path"):
        prepare(config("/nowhere", {"path": str(teacher)}), EXECUTION, None)
