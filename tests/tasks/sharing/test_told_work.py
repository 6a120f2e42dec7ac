"""What the log of a host's pod says that its device does."""

from resources.work_log import work_log
from tasks.sharing.spending import Spending


def test_each_change_of_what_the_device_does_is_said_with_the_run_and_its_iteration(capsys):
    with work_log("fleet f, host 0, serve for 8 h"):
        spending = Spending("h0")
        spending.note("backfill", "run-a", None, 1.0)
        for _ in range(3):
            spending.note("switch", "run-b", 4, 2.0)
        spending.note("train", "run-b", 4, 3.0)
        spending.note("idle", None, None, 4.0)
    said = [line.split("serve for 8 h: ")[1] for line in capsys.readouterr().err.splitlines()]
    assert said[1:-1] == [
        "while no phase is due, a member generates responses of run run-a",
        "restoring the state of run run-b, iteration 4",
        "training of run run-b, iteration 4",
        "waiting for a phase that is due",
    ]
