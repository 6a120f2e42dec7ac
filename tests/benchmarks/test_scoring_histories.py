from collections import Counter

from benchmarks import scoring_histories


def test_a_failing_seed_says_how_to_replay_it(capsys):
    failed = scoring_histories.Verdict(17, ("lost: response 3 has 0 scores",), Counter({"responses trained": 4}), 600.0)
    fine = scoring_histories.Verdict(18, (), Counter({"responses trained": 4}), 600.0)
    scoring_histories.report([failed, fine], 1.0, 2, True)
    out = capsys.readouterr().out
    assert "seed 17: lost: response 3 has 0 scores" in out
    assert "python -m benchmarks.scoring_histories --seed 17 --trace" in out
    assert '"failed_seeds": [17]' in out
    assert "MISSED histories with a trained response without scores" in out


def test_a_trace_shows_every_event_in_order(capsys):
    assert scoring_histories.trace(0)
    lines = capsys.readouterr().out.splitlines()
    moments = [float(line.split()[0]) for line in lines[:-1]]
    assert moments == sorted(moments)
    assert any("create iterations/000000/scoring/iterations/000000/claims/" in line for line in lines)
    assert lines[-1].startswith("seed 0: 0 rules broken")
