"""The graph that `iterations` hands to Flyte: how its compiler walks it, what waits for what, and how nodes are called.

Flyte's compiler (every release up to 1.16.8) looks for cycles by walking every path of a workflow without remembering
where it was. A chain with two ways through each iteration has 2^n paths, and holds the compiler for hours at n = 50.
"""

import functools
import re
from collections import defaultdict

import pytest
from flytekit.exceptions.user import FlyteUserRuntimeException

from tasks.configuration.run_config import parse
from tests.workflows.test_evaluation import EVALUATION
from tests.workflows.test_iteration import CONFIG, TWO_POOLS, job, unrolled
from workflows import compiled_size
from workflows.compiled_size import FLYTE_BYTES_MAX
from workflows.iteration import rollout_nodes

PLAIN, STALE = CONFIG, CONFIG | {"algorithm": {"max_staleness": 1}}
STALER = CONFIG | {"algorithm": {"max_staleness": 3}}
STANDING = {"rollout": {"crew": "standing"}}
RANKS = CONFIG | {"trainer": {"nnodes": 2, "nproc_per_node": 4}}
POD = CONFIG | {"trainer": {"placement": "pod"}}
SHARED = CONFIG | {"trainer": {"placement": "shared", "fleet": "s3://bucket/fleet", "nproc_per_node": 8}}
EXTERNAL = CONFIG | {"trainer": {"placement": "external"}}
STANDS = CONFIG | {"trainer": {"placement": "standing", "nproc_per_node": 8}}
SHAPES = {
    "plain": PLAIN,
    "one step off": STALE,
    "two pools": TWO_POOLS,
    "two pools one step off": TWO_POOLS | {"algorithm": {"max_staleness": 1}},
    "evaluations": CONFIG | {"evaluation": EVALUATION},
    "evaluations one step off": STALE | {"evaluation": EVALUATION},
    "several ranks": RANKS,
    "trained in pods": POD,
    "trained in pods one step off": POD | {"algorithm": {"max_staleness": 1}},
    "trained by a host": SHARED,
    "trained by a trainer that stands": STANDS,
    "trained by a program outside": EXTERNAL,
    "trainer and crew stand, one step off": STANDS | STANDING | {"algorithm": {"max_staleness": 1}},
    "three iterations ahead": STALER,
    "a standing crew": CONFIG | STANDING,
    "a standing crew in two pools, two iterations ahead": TWO_POOLS | STANDING | {"algorithm": {"max_staleness": 2}},
}
# Of a node's id, what carries the run on, and what else may be on its way.
SPINE = ("plan", "train", "conclude")
ON_THE_WAY = {*SPINE, "collect"}
STEPS_PER_ITERATION_MAX = 40


@functools.cache
def chain(shape, count):
    """What is handed to Flyte for so many iterations."""
    return job(count, SHAPES[shape])


def idl(nodes):
    return [node.to_flyte_idl() for node in nodes]


def edges(spec):
    """Downstream neighbours by node, as the compiler sees them: start and end are nodes, too."""
    nodes = idl(spec.nodes)
    found = defaultdict(set)
    for node in nodes:
        for before in node.upstream_node_ids or ["start-node"]:
            found[before].add(node.id)
    for output in spec.to_flyte_idl().outputs:
        for binding in output.binding.collection.bindings:
            found[binding.promise.node_id].add("end-node")
    for node in nodes:
        if not found[node.id]:
            found[node.id].add("end-node")
    return found


def walked_steps(found):
    """Visits of a depth-first search that does not remember where it was; stops beyond any number that is bearable."""
    steps, stack = 0, ["start-node"]
    while stack:
        steps += 1
        assert steps < 1_000_000, "the paths multiply"
        stack += found.get(stack.pop(), ())
    return steps


def upstream_closure(nodes, of):
    by_id = {node.id: set(node.upstream_node_ids) for node in nodes}
    found, stack = set(), [of]
    while stack:
        for before in by_id[stack.pop()] - found:
            found.add(before)
            stack.append(before)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_search_that_walks_every_path_takes_steps_in_proportion_to_the_iterations(shape):
    steps = {count: walked_steps(edges(chain(shape, count))) for count in (5, 8, 14)}
    per_iteration = [(steps[14] - steps[8]) / 6, (steps[8] - steps[5]) / 3]
    assert per_iteration[0] == pytest.approx(per_iteration[1])  # linear
    assert per_iteration[0] <= STEPS_PER_ITERATION_MAX


def test_a_conclusion_that_also_waited_for_the_rollout_would_multiply_the_paths():
    """The search above finds what it is for: the graph as it was, with three ways through each iteration."""
    found = defaultdict(set)
    for number in range(20):
        plan, rollout, train, conclude = (f"{kind}{number}" for kind in ("plan", "rollout", "train", "conclude"))
        found[plan] |= {rollout, train, conclude}
        found[rollout].add(conclude)
        found[train].add(conclude)
        found[conclude].add(f"plan{number + 1}")
    found["start-node"].add("plan0")
    with pytest.raises(AssertionError, match="the paths multiply"):
        walked_steps(found)


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 14])
@pytest.mark.parametrize("shape", SHAPES)
def test_nothing_that_carries_on_is_downstream_of_a_map(shape, count):
    nodes = idl(chain(shape, count).nodes)
    maps = {node.id for node in nodes if node.WhichOneof("target") == "array_node"}
    spine = [node.id for node in nodes if re.fullmatch(rf"i\d+-({'|'.join(SPINE)})", node.id)]
    assert len(spine) == 3 * count
    for each in spine[-3:]:
        before = upstream_closure(nodes, each)
        assert not maps & before
        assert {node.split("-", 1)[1] for node in before} <= ON_THE_WAY


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_a_node_that_does_not_carry_the_run_on_cannot_fail_but_for_the_last_one(shape):
    """A failed node ends the whole execution, and no container can catch that its memory runs out; a map can."""
    nodes = idl(chain(shape, 5).nodes)
    last = re.compile(r"\w+-evaluations")
    for node in nodes:
        if node.id.split("-", 1)[1] in ON_THE_WAY or last.fullmatch(node.id):
            continue
        assert node.array_node.HasField("min_success_ratio"), node.id
        assert node.array_node.min_success_ratio == 0
    ends = [node.id for node in nodes if last.fullmatch(node.id)]
    assert len(ends) == ("evaluation" in SHAPES[shape])
    for end in ends:
        # Flyte ends what still runs when a node fails, so all that carries on comes before.
        carried = {node.id for node in nodes if node.id.split("-", 1)[1] in ON_THE_WAY}
        assert carried <= upstream_closure(nodes, end)


def test_a_search_of_the_closure_finds_a_conclusion_behind_a_map():
    """The test above fails where a map is upstream of the spine."""
    nodes = idl(unrolled(2, PLAIN))
    [train] = [node for node in nodes if node.id == "i2-train"]
    train.upstream_node_ids.append("z1-rollout")
    assert "z1-rollout" in upstream_closure(nodes, "i2-conclude")


def test_the_spine_of_iterations_one_by_one():
    nodes = idl(unrolled(3, PLAIN))
    upstream = {node.id: set(node.upstream_node_ids) for node in nodes}
    assert upstream["i1-plan"] == set()
    for number in (1, 2, 3):
        assert upstream[f"i{number}-train"] == {f"i{number}-plan"}
        assert upstream[f"i{number}-conclude"] == {f"i{number}-train"}
        assert upstream[f"z{number}-rollout"] == {f"i{number}-plan"}
    assert (upstream["i2-plan"], upstream["i3-plan"]) == ({"i1-conclude"}, {"i2-conclude"})
    assert lasts(nodes) == [False, False, True]


def test_in_pods_groups_are_collected_on_the_control_pool_before_reserved_machines_are_asked_for():
    nodes = {node.id: node for node in idl(unrolled(2, POD))}
    for number in (1, 2):
        assert set(nodes[f"i{number}-collect"].upstream_node_ids) == {f"i{number}-plan"}
        assert set(nodes[f"i{number}-train"].upstream_node_ids) == {f"i{number}-collect"}
    of_collector = nodes["i1-collect"].task_node.overrides.resources.requests
    of_conclusion = nodes["i1-conclude"].task_node.overrides.resources.requests
    assert [(each.name, each.value) for each in of_collector] == [(each.name, each.value) for each in of_conclusion]


@pytest.mark.parametrize("config", [SHARED, STANDS])
def test_where_a_host_trains_no_iteration_asks_for_a_reserved_machine(config):
    nodes = {node.id: node for node in idl(unrolled(2, config))}
    of_train, of_conclusion = (
        nodes[name].task_node.overrides.resources.requests for name in ("i1-train", "i1-conclude")
    )
    assert [(each.name, each.value) for each in of_train] == [(each.name, each.value) for each in of_conclusion]


def test_a_trainer_that_stands_is_one_leaf_on_reserved_machines_beside_the_whole_chain():
    nodes = {node.id: node for node in idl(unrolled(5, STANDS))}
    trainer = nodes["zall-trainer"]
    assert set(trainer.upstream_node_ids) == {"i1-plan"}
    assert not [node for node in nodes.values() if "zall-trainer" in node.upstream_node_ids]
    given = {binding.var: binding.binding for binding in trainer.inputs}
    assert given["iterations"].scalar.primitive.integer == 5
    assert [each.promise.node_id for each in given["plan"].collection.bindings] == ["i1-plan"]
    assert trainer.metadata.name == "iterations 1 to 5: trainer"
    of_it = trainer.array_node.node.task_node.overrides.resources.requests
    of_own = {node.id: node for node in idl(unrolled(2, PLAIN))}["i1-train"].task_node.overrides.resources.requests
    assert [(each.name, each.value) for each in of_it] == [(each.name, each.value) for each in of_own]
    assert "zall-trainer" not in {node.id for node in idl(unrolled(2, SHARED))}


def test_one_step_off_the_next_plan_comes_before_this_iteration_is_trained():
    nodes = idl(unrolled(4, STALE))
    upstream = {node.id: set(node.upstream_node_ids) for node in nodes}
    assert upstream["i1-plan"] == set()
    assert upstream["i2-plan"] == {"i1-plan"}
    assert upstream["i3-plan"] == {"i1-conclude"}
    assert upstream["i4-plan"] == {"i2-conclude"}
    for number in (1, 2, 3):
        assert upstream[f"i{number}-train"] == {f"i{number + 1}-plan"}
    assert upstream["i4-train"] == {"i4-plan", "i3-conclude"}
    for number in (1, 2, 3, 4):
        assert upstream[f"i{number}-conclude"] == {f"i{number}-train"}
        # Rollouts wait for their plan alone, so the next one runs beside training.
        assert upstream[f"z{number}-rollout"] == {f"i{number}-plan"}
    order = [node.id for node in nodes]
    # On one machine nodes run in this order: a plan must come before the trainer that would give it newer weights.
    for number in (1, 2, 3):
        assert order.index(f"i{number + 1}-plan") < order.index(f"i{number}-train")
        assert order.index(f"i{number}-conclude") < order.index(f"z{number + 1}-rollout")
    assert lasts(nodes) == [False, False, False, True]
    ahead = [b.binding.scalar.primitive.integer for node in nodes for b in node.inputs if b.var == "ahead"]
    assert ahead == [0, 1, 1, 1]


def test_several_iterations_ahead_the_path_begins_with_their_plans():
    nodes = idl(unrolled(6, STALER))
    upstream = {node.id: set(node.upstream_node_ids) for node in nodes}
    assert upstream["i1-plan"] == set()
    for number in (2, 3, 4):
        assert upstream[f"i{number}-plan"] == {f"i{number - 1}-plan"}
    for number in (5, 6):
        assert upstream[f"i{number}-plan"] == {f"i{number - 4}-conclude"}
    for number in (1, 2, 3):
        assert upstream[f"i{number}-train"] == {f"i{number + 3}-plan"}
    for number in (4, 5, 6):
        assert upstream[f"i{number}-train"] == {f"i{number}-plan", f"i{number - 1}-conclude"}
    ahead = {node.id: b.binding.scalar.primitive.integer for node in nodes for b in node.inputs if b.var == "ahead"}
    assert list(ahead.values()) == [0, 1, 2, 3, 3, 3]
    assert lasts(nodes) == [False] * 5 + [True]


def test_fewer_iterations_than_may_run_ahead():
    nodes = idl(unrolled(2, STALER))
    upstream = {node.id: set(node.upstream_node_ids) for node in nodes}
    assert upstream["i1-train"] == upstream["z2-rollout"] == {"i2-plan"}
    assert upstream["i2-train"] == {"i2-plan", "i1-conclude"}


@pytest.mark.parametrize("stale", [{}, {"algorithm": {"max_staleness": 2}}])
def test_a_standing_crew_is_one_map_per_pool_beside_the_whole_chain(stale):
    nodes = idl(unrolled(5, TWO_POOLS | STANDING | stale))
    upstream = {node.id: set(node.upstream_node_ids) for node in nodes}
    arrays = [node for node in nodes if node.WhichOneof("target") == "array_node"]
    maps = {node.id: node for node in arrays if "end-of" not in node.id}
    pools = parse(TWO_POOLS | STANDING).pools
    assert list(maps) == ["zall-crew", "zall-crew-far"]
    for (name, node), slots in zip(maps.items(), pools.standing_slots.values(), strict=True):
        assert upstream[name] == {"i1-plan"}
        given = {binding.var: binding.binding for binding in node.inputs}
        assert [each.scalar.primitive.integer for each in given["slot"].collection.bindings] == slots
        assert given["iterations"].scalar.primitive.integer == 5
        assert upstream[name.replace("zall-", "zall-end-of-")] == {"i1-plan", name}
        assert node.metadata.name == f"iterations 1 to 5: {name.removeprefix('zall-').replace('-', ' ')}"
    assert not [name for name in upstream if name.endswith("rollout")]


def lasts(nodes):
    """Which conclusions are the last of their execution; the plans, by which trainers store a checkpoint, agree."""
    found = {}
    for what in ("plan", "conclude"):
        of_kind = [node for node in nodes if node.id.endswith(f"-{what}")]
        last = [binding.binding for node in of_kind for binding in node.inputs if binding.var == "last"]
        found[what] = [binding.scalar.primitive.boolean for binding in last]
    assert found["plan"] == found["conclude"]
    return found["conclude"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_nodes_are_told_apart_in_the_console_and_name_their_pods(shape):
    nodes = idl(chain(shape, 14).nodes)
    names = {node.id: node.metadata.name for node in nodes}
    assert len(set(names.values())) == len(names) == len(nodes)
    assert names["i2-train"] == "iteration 2 of 14: train"
    assert names.get("z13-rollout", "iteration 13 of 14: rollout") == "iteration 13 of 14: rollout"
    for node, name in names.items():
        assert re.fullmatch(r"(i\d+|z\d+|zall)-[a-z0-9-]+", node)
        assert len(node) <= 63
        assert re.match(r"((iteration \d+|before iteration 1) of 14|iterations 1 to 14): ", name)


def test_a_pool_with_a_long_name_has_nodes_whose_ids_are_short_enough():
    long_name = "p" + 39 * "x"
    pools = CONFIG["pools"] | {"more_rollout": {long_name: {"count": 1}, "under_score": {"count": 1}}}
    ids = [node.id for node in idl(unrolled(1, CONFIG | {"pools": pools}))]
    assert len(set(ids)) == len(ids)
    assert all(len(each) <= 63 and re.fullmatch(r"[a-z0-9-]+", each) for each in ids)


@pytest.fixture(params=SHAPES)
def bounded(request, monkeypatch):
    """(configuration, bytes that Flyte reads): the real limit for one shape, for speed a 16th of it for others."""
    if request.param != "plain":
        monkeypatch.setattr(compiled_size, "FLYTE_BYTES_MAX", FLYTE_BYTES_MAX // 16)
    return SHAPES[request.param], compiled_size.FLYTE_BYTES_MAX


def largest_allowed(config):
    with pytest.raises(FlyteUserRuntimeException, match=r"allowed with this configuration: 1 to \d+") as raised:
        job(100_000, config)
    return int(re.search(r"1 to (\d+)", str(raised.value))[1])


@pytest.mark.slow
def test_a_count_that_flyte_could_not_read_back_is_refused_with_the_largest_that_it_can(bounded):
    config, bytes_max = bounded
    largest = largest_allowed(config)
    spec = job(largest, config)
    stored = spec.to_flyte_idl().ByteSize()
    assert 0.8 * bytes_max < stored < 0.95 * bytes_max
    assert walked_steps(edges(spec)) <= STEPS_PER_ITERATION_MAX * largest + 100
    with pytest.raises(FlyteUserRuntimeException, match=f"count: value {largest + 1}; allowed"):
        job(largest + 1, config)


def test_the_crew_is_wired_for_side_effects_alone():
    """Nobody can wait for what is not returned."""
    assert rollout_nodes.__annotations__["return"] is None
