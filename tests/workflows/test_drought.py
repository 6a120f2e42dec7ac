"""A long drought of machines on Flyte: whatever an execution's parallelism is, waiting maps never hold the path back.

`Rounds` looks at the compiled nodes as flytepropeller 1.16.8 does (nodes/executor.go, nodes/array/handler.go): depth
first, and the nodes behind a node in the alphabetical order in which the compiler stores them. A task or a map is not
looked at where as many are counted as the execution's parallelism. Each that is at work counts, a map as one, however
many of its pods wait.
"""

import pytest

from tests.covering import covering
from tests.workflows.test_iteration import CONFIG, TWO_POOLS
from tests.workflows.test_spine import SHAPES, chain, edges, idl, unrolled

# There are more iterations than any of these parallelisms, so that waiting maps could fill it, and more than 9, so that
# the order of names is not that of numbers. Flyte's default parallelism, 25, would show the same in twice the time.
COUNT, SLOTS, ROUNDS_OF_A_TASK = 14, 10, 3
PARALLELISMS = (2, 3, 11)


class Rounds:
    """What propeller does round by round. hybrid: how maps without a parallelism of their own share the execution's."""

    def __init__(self, spec, parallelism, *, hybrid=False):
        self.nodes = {node.id: node for node in idl(spec.nodes)}
        self.behind = edges(spec)
        self.parallelism, self.hybrid = parallelism, hybrid
        self.machines_come = False
        self.age = {}
        self.done = {"start-node"}

    def run(self):
        """Round after round until nothing changes any more."""
        before = None
        while before != (before := (dict(self.age), set(self.done))):
            self.counted = 0
            self._look("start-node")

    def _look(self, name):
        if name in self.done:
            for behind in sorted(self.behind[name]):
                self._look(behind)
        elif name in self.nodes and self.counted < self.parallelism:
            self._handle(self.nodes[name])

    def _handle(self, node):
        if not self.done.issuperset(node.upstream_node_ids):
            return
        if node.id not in self.age:
            self.age[node.id] = 0
            self.counted += 1  # queued
        elif node.WhichOneof("target") == "array_node":
            self._handle_map(node)
        elif self.age[node.id] == ROUNDS_OF_A_TASK:
            self.done.add(node.id)
        else:
            self.age[node.id] += 1
            self.counted += 1

    def _handle_map(self, node):
        shares = node.array_node.WhichOneof("parallelism_option") is None and self.hybrid
        if self.machines_come:
            self.done.add(node.id)
        else:
            self.counted += min(SLOTS, self.parallelism - self.counted) if shares else 1

    def concluded(self):
        return [name for name in self.done if name.endswith("-conclude")]


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "parallelism", "hybrid"), covering(SHAPES, PARALLELISMS, [False, True]))
def test_every_iteration_concludes_without_any_machine_for_members(shape, parallelism, hybrid):
    rounds = Rounds(chain(shape, COUNT), parallelism, hybrid=hybrid)
    rounds.run()
    assert len(rounds.concluded()) == COUNT
    maps = [name for name, node in rounds.nodes.items() if node.WhichOneof("target") == "array_node"]
    assert not rounds.done.intersection(maps)
    # When machines come, all that was left behind is done, too.
    rounds.machines_come = True
    rounds.run()
    assert rounds.done.issuperset(rounds.nodes)


def test_while_one_iteration_is_trained_the_maps_of_the_newest_one_come_first():
    """With room for two, that is for the trainer and one more, it is not a map of an iteration that is over."""
    rounds = Rounds(unrolled_spec(2), 2)
    rounds.run()
    assert "z2-rollout" in rounds.age


def test_leaves_whose_ids_came_before_the_path_would_hold_it_back():
    """The search above finds what it is for: ids in whose alphabetical order a map comes before the trainer."""
    parallelism = PARALLELISMS[-1]
    rounds = Rounds(unrolled_spec(parallelism + 2), parallelism)
    early = {name: name.replace("z", "a", 1) for name in rounds.nodes if name.startswith("z")}
    rounds.behind = {
        early.get(name, name): {early.get(each, each) for each in found} for name, found in rounds.behind.items()
    }
    for node in list(rounds.nodes.values()):
        node.id = early.get(node.id, node.id)
        node.upstream_node_ids[:] = [early.get(each, each) for each in node.upstream_node_ids]
    rounds.nodes = {node.id: node for node in rounds.nodes.values()}
    rounds.run()
    assert len(rounds.concluded()) == parallelism - 1
    assert rounds.age[f"i{parallelism}-plan"] == ROUNDS_OF_A_TASK
    assert f"i{parallelism}-train" not in rounds.age


@pytest.mark.parametrize("config", [CONFIG, TWO_POOLS | {"rollout": {"crew": "standing"}}])
def test_a_map_without_a_limit_says_so_and_takes_no_share_of_the_executions_parallelism(config):
    unlimited = {name: pool | {"concurrency": 0} for name, pool in config["pools"].items() if name == "rollout"}
    maps = [
        node.array_node
        for node in idl(unrolled(2, config | {"pools": config["pools"] | unlimited}))
        if node.WhichOneof("target") == "array_node" and node.id.endswith(("rollout", "crew"))
    ]
    assert maps
    assert {each.WhichOneof("parallelism_option") for each in maps} == {"parallelism"}
    assert {each.parallelism for each in maps} == {0}


def unrolled_spec(count):
    return chain("plain", count)
