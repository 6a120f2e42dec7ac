from storage.journal.turns import CallRecord, TurnRecord, encode_turn
from tasks.viewing.response_view import CallView, calls_of


def a_call(**changes):
    given = {"call_id": "c", "name": "look", "arguments": {"key": "ä"}, "result": "4", "outcome": "answered"}
    return CallRecord(**(given | {"unknown": False, "seconds": 0.5} | changes))


EVENTS = [
    encode_turn(TurnRecord(turn=0, calls=(a_call(), a_call(result="\x1b[31m", outcome="raised")), seconds=1.0)),
    encode_turn(TurnRecord(turn=1, calls=(a_call(unknown=True),), seconds=1.0)),
    encode_turn(TurnRecord(turn=2, calls=(), seconds=0.0, reward=1.0)),
]


def test_calls_are_those_of_all_turns_in_order():
    assert list(calls_of(EVENTS)) == [
        CallView(turn=0, call='look {"key": "ä"}', result="4", outcome="answered", seconds=0.5),
        CallView(turn=0, call='look {"key": "ä"}', result="\x1b[31m", outcome="raised", seconds=0.5),
        CallView(turn=1, call='look {"key": "ä"}', result="4", outcome="answered (unknown)", seconds=0.5),
    ]
    assert list(calls_of(())) == []
