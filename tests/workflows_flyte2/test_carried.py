"""Which failures another attempt may mend, in a thread and in a process of its own."""

from collections import Counter

import flyte.errors
import pytest

from tests.flyte2_runs import local_run
from tests.flyte2_tasks import element_inside, elements

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("default")]


def attempts(folder) -> dict[str, int]:
    return dict(Counter(file.name.partition("-")[0] for file in folder.iterdir()))


@pytest.mark.parametrize("width", [0, 2])
def test_members_of_a_group_fail_alone_and_come_again_after_a_kill(tmp_path, width):
    run = local_run(elements, {"slots": [0, 1, 2, 3, 4], "width": width}, folder=str(tmp_path))
    zero, one, two, three, four = run.outputs()[0]
    assert (zero, one, two) == ("0", "1", "4")
    assert three == "three is not allowed"
    assert "exit code -9" in four
    assert attempts(tmp_path) == {"0": 1, "1": 2, "2": 2, "3": 1, "4": 2}


def test_a_task_in_a_thread_comes_again_only_where_it_may_help(tmp_path):
    assert local_run(element_inside, {"slot": 2}, folder=str(tmp_path)).outputs()[0] == 4
    with pytest.raises(flyte.errors.RuntimeUserError, match="three is not allowed") as raised:
        local_run(element_inside, {"slot": 3}, folder=str(tmp_path))
    assert raised.value.code == "ValueError"
    assert attempts(tmp_path) == {"2": 2, "3": 1}
