"""What `make demo-tools` concludes from the stored responses and the ledger, and the settings that it writes."""

from pathlib import Path

import numpy as np
import yaml

from examples.call_ledger import CallLedger
from examples.tools_demo import CONFIG, ITERATION_KILLED, SLEEP_S, Kills, report, write_settings
from storage.journal.responses import Response
from storage.journal.shard import Finish
from storage.journal.turns import CallRecord, TurnRecord, encode_turn
from storage.stores.memory import MemoryStore
from tasks.configuration.run_config import parse
from tasks.turns.current_call import CurrentCall


def test_settings_are_the_example_with_a_run_a_model_and_a_dataset(tmp_path: Path):
    write_settings(tmp_path / "settings.yaml", tmp_path / "run", tmp_path / "model", tmp_path / "data.jsonl")
    found, example = yaml.safe_load((tmp_path / "settings.yaml").read_text()), yaml.safe_load(CONFIG.read_text())
    assert found["data"]["source"] == str(tmp_path / "data.jsonl")
    example["run"]["url"], example["policy"]["path"] = str(tmp_path / "run"), str(tmp_path / "model")
    assert found == example | {"data": found["data"]}
    turns = parse(found).turns
    assert turns is not None
    assert turns.call_time_limit_s > SLEEP_S


def response(number: int, *calls: tuple[str, bool]) -> Response:
    event = TurnRecord(
        turn=0,
        calls=tuple(
            CallRecord(
                call_id=name, name="look", arguments={}, result="1", outcome="answered", unknown=unknown, seconds=0.0
            )
            for name, unknown in calls
        ),
        seconds=0.1,
    )
    return Response(
        number,
        0,
        "p",
        np.array([3, 4, 5], dtype=np.uint32),
        np.array([-0.5, -0.5], dtype=np.float32),
        Finish.STOP,
        1.0,
        {"environment": 1.0},
        0,
        1,
        (2, 1),
        (encode_turn(event),),
    )


def judged(folder: Path, begun: list[str], *, interrupted: str | None = "b", same: bool = True) -> bool:
    """What is reported of two responses with the calls a and b, of which b was interrupted."""
    ledger = CallLedger(folder / "ledger")
    for call_id in begun:
        ledger.begin(CurrentCall(call_id=call_id, epoch=0, iteration=ITERATION_KILLED, response=0), process=1)
    for call_id in set(begun):
        ledger.end(CurrentCall(call_id=call_id, epoch=0, iteration=ITERATION_KILLED, response=0))
    kills = Kills(MemoryStore(), ledger, interrupted, {0: "inside a call", 1: "decoding"})
    kept = [response(0, ("a", False)), response(1, ("b", True))]
    return report(kills, ledger.rows(ITERATION_KILLED), kept, len(kept) if same else len(kept) - 1)


def test_only_the_interrupted_call_may_be_made_again(tmp_path: Path):
    for name in ("good", "never", "twice", "other", "unequal", "alive"):
        (tmp_path / name).mkdir()
    assert judged(tmp_path / "good", ["a", "b", "b"])
    assert not judged(tmp_path / "never", ["a", "b"])
    assert not judged(tmp_path / "twice", ["a", "a", "b", "b"])
    assert not judged(tmp_path / "other", ["a", "b", "b", "c"])
    assert not judged(tmp_path / "unequal", ["a", "b", "b"], same=False)
    assert not judged(tmp_path / "alive", ["a", "b", "b"], interrupted=None)
