from benchmarks.break_even import LENGTHS, LOSSES_PER_H, break_even_rows, journal_s_per_token, print_savings, takeover_s
from benchmarks.resume_value import EngineCosts

GPU = EngineCosts(
    responses_in_flight=64,
    decode_tokens_per_s=40.0,
    prefill_tokens_per_s=10_000.0,
    journal_share=0.002,
    flush_interval_s=5.0,
    takeover_s=2.0,
)


def test_table_says_where_journals_pay_and_where_they_do_not(capsys):
    rows = break_even_rows({"assumed": GPU})
    assert [row["tokens"] for row in rows] == list(LENGTHS)
    assert all(len(row["saving %"]) == len(LOSSES_PER_H) for row in rows)
    shortest, longest = rows[0], rows[-1]
    assert shortest["from losses/h"] is None
    assert max(shortest["saving %"].values()) < 0
    assert longest["saving %"]["4.0"] > 20
    assert longest["saving %"]["0.01"] < 0 < longest["saving %"]["0.1"]
    overhead = longest["overhead %"]["1.8"]
    assert overhead["token"] < overhead["response"] < overhead["batch"]
    print_savings(rows)
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(LENGTHS) + 2
    assert "never" in lines[2]


def test_parts_are_measured_on_whole_journals():
    assert 0 < takeover_s() < 10
    assert 0 < journal_s_per_token(steps=400) < 0.01
