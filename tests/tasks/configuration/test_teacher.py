"""The section `teacher`: its forms, what each form excludes, and the name of a prompt's teacher."""

import pytest

from tasks.configuration.run_config import ConfigError, changes, digest, dump, parse, parse_held
from tasks.configuration.teacher import TeacherConfig
from tasks.preparing.vain_settings import settings_in_vain
from tests.small_run import document


def config(teacher, *, rewards=True, **sections):
    given = document("memory://teacher", "model", teacher=teacher, **sections)
    if not rewards:
        del given["rewards"]
    return parse(given)


WRONG = [
    ({}, "teacher.path: missing; allowed: either path or paths"),
    ({"path": "a", "paths": {"m": "b"}, "column": "c"}, "teacher.path: given; allowed: either path or paths"),
    ({"paths": {"m": "b"}}, "teacher.column: missing; allowed with paths: a column of the data"),
    ({"path": "a", "column": "c"}, "teacher.column: given; allowed with path: nothing"),
    ({"paths": {"m": "b"}, "column": "c", "revision": "x"}, "teacher.revision: value 'x'; allowed with paths: null"),
    ({"paths": {"a/b": "b"}, "column": "c"}, "teacher.paths: name 'a/b'; allowed: up to 64 letters"),
    ({"path": "a", "kl": "jsd"}, "teacher.kl: value 'jsd'; allowed without top_k: 'reverse'"),
    ({"path": "a", "kl": "forward"}, "teacher.kl: value 'forward'; allowed without top_k: 'reverse'"),
    ({"path": "a", "weight": 0}, "teacher.weight"),
    ({"path": "a", "top_k": 0}, "teacher.top_k"),
    ({"path": "a", "top_k": 257}, "teacher.top_k"),
    ({"path": "a", "pool": 3}, "teacher.pool"),
]


@pytest.mark.parametrize(("teacher", "line"), WRONG)
def test_a_wrong_section_is_refused_in_a_line_that_names_the_field(teacher, line):
    with pytest.raises(ConfigError) as caught:
        config(teacher)
    assert any(problem.startswith(line) for problem in caught.value.problems), caught.value.problems


CLASHES = [
    ({"algorithm": {"kind": "sft"}}, "teacher: given; allowed with algorithm.kind 'sft': nothing"),
    ({"algorithm": {"filter_groups": True}}, "algorithm.filter_groups: value true; allowed with teacher: false"),
    (
        {"evaluation": {"data": {"source": "arithmetic", "seed": 9}}},
        "evaluation.rewards: value null; allowed without rewards: at least one",
    ),
]


@pytest.mark.parametrize(("sections", "line"), CLASHES)
def test_what_a_teacher_excludes_is_refused(sections, line):
    with pytest.raises(ConfigError) as caught:
        config({"path": "a"}, rewards=False, **sections)
    assert any(problem.startswith(line) for problem in caught.value.problems), caught.value.problems


def test_a_run_with_a_teacher_needs_no_rewards_and_is_read_back():
    alone = config({"path": "a", "top_k": 4, "kl": "forward"}, rewards=False)
    assert alone.rewards == ()
    assert parse_held(dump(alone)) == alone
    with pytest.raises(ConfigError, match="rewards: missing"):
        config(None, rewards=False)


def test_without_a_teacher_the_identity_of_a_run_is_what_it_is_without_the_section():
    without = parse(document("memory://teacher", "model"))
    assert digest(config(None)) == digest(without)
    assert len({digest(without), digest(config({"path": "a"})), digest(config({"path": "a", "weight": 2.0}))}) == 3


def test_a_prompts_teacher_is_the_one_that_its_column_names():
    several = TeacherConfig(paths={"math": "a", "code": "b"}, column="subject")
    assert several.models == {"math": "a", "code": "b"}
    assert several.teacher_of({"subject": "code"}) == "code"
    assert TeacherConfig(path="a").teacher_of({}) == "teacher"
    with pytest.raises(ValueError, match=r"column 'subject': value 'art'; allowed \(teacher.paths\): 'math', 'code'"):
        several.teacher_of({"subject": "art"})
    with pytest.raises(ValueError, match="column 'subject': missing"):
        several.teacher_of({})


SCORING = {"scoring": {"scorers": {"count": 2}}}
ELSEWHERE = "allowed: null, or a pool of pools.scoring"
POOL_CLASHES = [
    ("teachers", SCORING, f"teacher.pool: value 'teachers'; {ELSEWHERE} ('scorers')"),
    ("scorers", {}, f"teacher.pool: value 'scorers'; {ELSEWHERE} (none is there)"),
    ("rollout", {}, f"teacher.pool: value 'rollout'; {ELSEWHERE} (none is there); pool 'rollout' has other work"),
    ("train", SCORING, f"teacher.pool: value 'train'; {ELSEWHERE} ('scorers'); pool 'train' has other work"),
    (
        "far",
        {"more_rollout": {"far": {}}},
        f"teacher.pool: value 'far'; {ELSEWHERE} (none is there); pool 'far' has other work",
    ),
    (None, SCORING, "pools.scoring.scorers: given; allowed: the pool that teacher.pool names (null)"),
    ("scorers", {"scoring": {"rollout": {}}}, "pools.scoring: 'rollout' given; allowed: other names than"),
    ("scorers", {"scoring": {"Big": {}}}, "pools.scoring: value 'Big'; allowed: names of up to 40 small letters"),
    (
        "far",
        {"scoring": {"far": {}}, "more_rollout": {"far": {}}},
        "pools.scoring: 'far' given; allowed: other names than those of more_rollout",
    ),
]


@pytest.mark.parametrize(("pool", "pools", "line"), POOL_CLASHES)
def test_a_pool_that_cannot_score_is_refused(pool, pools, line):
    with pytest.raises(ConfigError) as caught:
        config({"path": "a", "pool": pool}, pools=pools)
    assert any(problem.startswith(line) for problem in caught.value.problems), caught.value.problems


VLLM = {"path": "a", "engine": "vllm"}
POOLED = VLLM | {"pool": "scorers"}
VLLM_CLASHES = [
    (VLLM, {}, "teacher.engine: value 'vllm'; allowed without teacher.pool: 'torch'"),
    (POOLED | {"engine": "sglang"}, SCORING, "teacher.engine: \"sglang\" given; input should be 'torch' or 'vllm'"),
    (POOLED | {"vllm": {"max_lora_rank": 8}}, SCORING, "teacher.vllm.max_lora_rank: value 8; allowed: null"),
    (
        POOLED | {"vllm": {"tensor_parallel_size": 0}},
        SCORING,
        "teacher.vllm.tensor_parallel_size: 0 given; input should be",
    ),
    (POOLED | {"vllm": {"top_k": 3}}, SCORING, "teacher.vllm.top_k"),
    (
        POOLED | {"vllm": {"tensor_parallel_size": 4}},
        {"scoring": {"scorers": {"gpus": 2}}},
        "pools.scoring.scorers.gpus: value 2; allowed: 0, or a multiple of teacher.vllm.tensor_parallel_size (4)",
    ),
]


@pytest.mark.parametrize(("teacher", "pools", "line"), VLLM_CLASHES)
def test_what_scorers_by_vllm_exclude_is_refused(teacher, pools, line):
    with pytest.raises(ConfigError) as caught:
        config(teacher, pools=pools)
    assert any(problem.startswith(line) for problem in caught.value.problems), caught.value.problems


def test_the_engine_of_scorers_may_change_within_a_run_and_8_bit_weights_may_not():
    torch, vllm = (
        config({"path": "a", "pool": "scorers", "engine": name}, pools=SCORING) for name in ("torch", "vllm")
    )
    larger, quantised = (
        config(POOLED | {"vllm": settings}, pools=SCORING)
        for settings in ({"gpu_memory_utilization": 0.5}, {"quantization": "fp8"})
    )
    assert digest(torch) == digest(vllm) == digest(larger) == digest(config({"path": "a"}))
    assert changes(torch, larger) == []
    assert digest(quantised) != digest(vllm)
    assert changes(vllm, quantised) == ['teacher.vllm.quantization: null here, "fp8" there']
    assert changes(config(None), vllm)[0].startswith("teacher: null here")


def test_teachers_of_a_scorer_share_its_gpus():
    two = TeacherConfig(paths={"math": "a", "code": "b"}, column="subject")
    assert two.vllm_of_each.gpu_memory_utilization == pytest.approx(two.vllm.gpu_memory_utilization / 2)


@pytest.mark.parametrize(
    ("teacher", "gpus", "words"),
    [
        ({}, 2, "of which a scorer uses one with teacher.engine torch"),
        ({"engine": "vllm", "vllm": {"tensor_parallel_size": 2}}, 4, "teacher.vllm.tensor_parallel_size (2)"),
    ],
)
def test_gpus_that_a_scorer_leaves_idle_are_doubted(teacher, gpus, words):
    for given, expected in ((gpus, 1), (gpus // 2, 0)):
        pools = {"scoring": {"scorers": {"gpus": given}}}
        found = settings_in_vain(config({"path": "a", "pool": "scorers"} | teacher, pools=pools))
        of_pool = [line for line in found if line.startswith(f"pools.scoring.scorers.gpus: value {given}")]
        assert len(of_pool) == expected
        assert all(words in line for line in of_pool)


@pytest.mark.parametrize("kind", ["sft", "dpo"])
def test_a_pool_scores_no_examples(kind):
    with pytest.raises(ConfigError) as caught:
        config({"path": "a", "pool": "scorers"}, rewards=False, pools=SCORING, algorithm={"kind": kind})
    line = f"teacher: given; allowed with algorithm.kind '{kind}': nothing, because it scores the policy's tokens"
    assert line in caught.value.problems


def test_a_pool_does_not_decide_what_is_learned():
    alone, pooled = config({"path": "a"}), config({"path": "a", "pool": "scorers"}, pools=SCORING)
    assert digest(alone) == digest(pooled)
    assert pooled.pools.by_path["pools.scoring.scorers"].count == 2
    assert parse_held(dump(pooled)) == pooled
