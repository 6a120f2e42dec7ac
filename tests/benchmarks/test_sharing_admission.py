"""What the benchmark of admission counts as wrong, and what it draws."""

import json
from argparse import Namespace

import pytest

from benchmarks.sharing_admission import LOAD_MAX, Compared, compare_all, draw, report


def compared(predicted, long, simulated=True):
    return Compared(number=0, predicted=predicted, long=long, load=0.5, simulated=simulated, repeated=4, unsure=0.001)


@pytest.mark.parametrize(
    ("predicted", "long", "refused", "admitted"),
    [
        (1.11, 1.06, True, False),
        (1.11, 1.09, False, False),
        (1.09, 1.14, False, True),
        (1.09, 1.12, False, False),
        (1.02, 1.02, False, False),
        (1.5, 1.5, False, False),
    ],
)
def test_wrong_answers_are_those_further_from_the_bound_than_predictions_may_be_off(predicted, long, refused, admitted):
    found = compared(predicted, long)
    assert (found.is_wrongly_refused, found.is_wrongly_admitted) == (refused, admitted)


def test_draws_are_the_same_each_time_and_differ_from_each_other():
    drawn = [draw(number) for number in range(50)]
    again = [draw(number) for number in range(50)]
    loads_of = [[[run.load for run in each.runs] for each in found] for found in (drawn, again)]
    assert loads_of[0] == loads_of[1]
    assert {len(each.runs) for each in drawn} == {2, 3, 4, 5, 6}
    assert {run.rollouts_ahead for each in drawn for run in each.runs} == {0, 1}
    loads = [sum(run.load for run in each.runs) for each in drawn]
    assert min(loads) < 0.5
    assert 1.0 < max(loads) <= LOAD_MAX + 1e-9


def test_a_prediction_that_is_off_or_an_answer_that_is_wrong_is_missed(capsys):
    report([compared(1.02, 1.03), compared(1.12, 1.06), compared(1.4, 1.6, simulated=False)], as_json=True)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {name: target["met"] for name, target in summary["targets"].items()} == {
        "right_answers": False,
        "simulated_slowdown_off_by_at_most": False,
        "refused_although_they_fit": False,
        "admitted_although_too_slow": True,
    }
    assert [(row["fleets"], row["simulated"]) for row in summary["rows"]] == [(1, 1), (1, 1), (0, 0), (1, 0)]
    report([compared(1.02, 1.03), compared(1.4, 1.6, simulated=False)], as_json=True)
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert all(target["met"] for target in summary["targets"].values())


def test_a_draw_that_a_file_holds_is_not_compared_again(tmp_path):
    file = tmp_path / "kept.jsonl"
    kept = '{"number": 0, "predicted": 7.0, "long": 7.5, "load": 1.0, "simulated": true, "repeated": 6, "unsure": 0.0}'
    file.write_text(f'{kept}\n{{"number": 1, "predi')
    calm = next(number for number in range(1, 50) if sum(run.load for run in draw(number).runs) < 0.2)
    found = compare_all([0, calm], Namespace(kept=file, workers=0))
    assert [each.number for each in found] == [0, calm]
    assert found[0].predicted == 7.0
    assert 1.0 < found[1].predicted == pytest.approx(found[1].long, abs=0.03)
    assert compare_all([0, calm], Namespace(kept=file, workers=0)) == found
    assert [json.loads(line)["number"] for line in file.read_text().splitlines()] == [0, calm]
