"""The size of the workflow that `iterations` hands to Flyte, and how large it may be.

Flyte stores the nodes of a dynamic task as one object and reads it back whole. Locally nothing is stored, so nothing is
limited.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from flytekit.core.context_manager import ExecutionState, FlyteContextManager
from flytekit.tools.translator import get_serializable

# storage.limits.maxDownloadMBs of a default propeller configuration.
FLYTE_BYTES_MAX = 2 << 20
# What Flyte's compiler adds to each node (its neighbours), and longer numbers in names.
SHARE_USED = 0.9
SAMPLE = 3


class TooManyIterationsError(ValueError):
    """An execution of so many iterations would not fit in what Flyte stores of one."""


def check_size(chain: Callable[[int], Any], count: int) -> None:
    """Raise TooManyIterationsError, with the largest count that fits, before a chain is wired that Flyte cannot read.

    chain: wires so many iterations. Two short chains are wired on the side and serialised; an iteration takes what the
    longer one takes more.
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
    """Serialised bytes of the nodes of a chain and of the tasks they refer to."""
    context = FlyteContextManager.current_context()
    entities: OrderedDict[Any, Any] = OrderedDict()
    with FlyteContextManager.with_context(
        context.with_compilation_state(context.new_compilation_state(prefix="size"))
    ) as inside:
        chain(count)
        nodes = inside.compilation_state.nodes
        models = [get_serializable(entities, inside.serialization_settings, node) for node in nodes]
    nodes_bytes: int = sum(model.to_flyte_idl().ByteSize() for model in models)
    # A node of another kind than a task's has its tasks among the entities, too.
    specs = [spec for spec in entities.values() if hasattr(spec, "template") and hasattr(spec.template, "interface")]
    tasks_bytes: int = sum(spec.template.to_flyte_idl().ByteSize() for spec in specs)
    return nodes_bytes + tasks_bytes
