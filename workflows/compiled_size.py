"""The size of the workflow that `iterations` hands to Flyte, and its limit.

Flyte stores the nodes of a dynamic task as one object and reads it back whole. A local run stores nothing, and so has
no limit.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.tools.translator import get_serializable

# storage.limits.maxDownloadMBs of a default propeller configuration.
FLYTE_BYTES_MAX = 2 << 20
# Leaves room for what Flyte's compiler adds to each node (its neighbours), and for longer numbers in names.
SHARE_USED = 0.9
SAMPLE = 3


class TooManyIterationsError(ValueError):
    """This many iterations do not fit into the object in which Flyte stores an execution's nodes."""


def check_size(chain: Callable[[int], Any], count: int) -> None:
    """Raise TooManyIterationsError, with the largest count that fits, before wiring a chain that Flyte cannot read.

    chain: wires this many iterations. Two short chains are wired aside and serialised; an iteration takes as many bytes
    as the longer one has more.
    """
    state = FlyteContextManager.current_context().execution_state
    if state is None or state.mode != ExecutionState.Mode.DYNAMIC_TASK_EXECUTION or count <= SAMPLE:
        return
    few, more = _compiled_bytes(chain, SAMPLE), _compiled_bytes(chain, SAMPLE + 1)
    largest = SAMPLE + int((SHARE_USED * FLYTE_BYTES_MAX - few) // (more - few))
    if count > largest:
        raise TooManyIterationsError(
            f"count: value {count}; allowed with this configuration: 1 to {largest}, because Flyte reads at most "
            f"{FLYTE_BYTES_MAX >> 20} MiB of a dynamic workflow and an iteration takes {more - few} bytes; run the "
            "command again to add more, or use the launch plan continue_run"
        )


def _compiled_bytes(chain: Callable[[int], Any], count: int) -> int:
    """Serialised bytes of a chain's nodes and of the tasks they refer to."""
    context = FlyteContextManager.current_context()
    entities: OrderedDict[Any, Any] = OrderedDict()
    with FlyteContextManager.with_context(
        context.with_compilation_state(context.new_compilation_state(prefix="size"))
    ) as inside:
        chain(count)
        nodes = inside.compilation_state.nodes
        models = [get_serializable(entities, inside.serialization_settings, node) for node in nodes]
    nodes_bytes: int = sum(model.to_flyte_idl().ByteSize() for model in models)
    # The tasks of a node that is not a task's own are among the entities, too.
    specs = [spec for spec in entities.values() if hasattr(spec, "template") and hasattr(spec.template, "interface")]
    tasks_bytes: int = sum(spec.template.to_flyte_idl().ByteSize() for spec in specs)
    return nodes_bytes + tasks_bytes
