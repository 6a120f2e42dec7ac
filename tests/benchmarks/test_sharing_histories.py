from collections import Counter

from benchmarks import sharing_histories


def test_a_failing_seed_says_how_to_replay_it(capsys):
    failed = sharing_histories.Verdict(17, ("early: a phase",), Counter({"phases": 4}), 600.0, 1, 2, 0.2)
    fine = sharing_histories.Verdict(18, (), Counter({"phases": 4}), 600.0, 0, 0, 0.3)
    sharing_histories.report([failed, fine], 1.0, 2, True)
    out = capsys.readouterr().out
    assert "seed 17: early: a phase" in out
    assert "python -m benchmarks.sharing_histories --seed 17 --trace" in out
    assert '"failed_seeds": [17]' in out
    assert "MISSED histories with a phase that began before it was due: 1" in out


def test_a_trace_shows_every_event_in_order(capsys):
    assert sharing_histories.trace(0)
    lines = capsys.readouterr().out.splitlines()
    moments = [float(line.split()[0]) for line in lines[:-1]]
    assert moments == sorted(moments)
    assert any("/seats/000001.json" in line for line in lines)
    assert lines[-1].startswith("seed 0: 0 rules broken")
