import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.forecasting.response_lengths import ResponseLengths, tool_answers
from tasks.forecasting.scenario import LengthsScenario, ScenarioError, ToolsScenario, WorkScenario

LOGNORMAL = LengthsScenario(median=1000.0, sigma=0.8, cap=100_000, rho=0.5)
TOKENS = np.full((250, 8), 400, dtype=np.int64)


def drawn(lengths: LengthsScenario, **changes) -> ResponseLengths:
    work = WorkScenario(num_prompts_per_step=2000, num_generations=2, prompt_tokens=1, lengths=lengths, iterations=9)
    return ResponseLengths(replace(work, **changes), 7)


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
def test_the_distribution_and_the_correlation_are_those_that_were_asked_for(rho):
    logs = np.log(drawn(replace(LOGNORMAL, rho=rho)).lengths(0))
    assert np.median(logs) == pytest.approx(np.log(1000), abs=0.06)
    assert logs.std() == pytest.approx(0.8, abs=0.03)
    assert np.corrcoef(logs.T)[0, 1] == pytest.approx(rho, abs=0.06)


def test_quantiles_inline_and_from_a_file_are_the_same(tmp_path):
    points = ((0.0, 10.0), (0.5, 100.0), (1.0, 1000.0))
    (tmp_path / "q.csv").write_text("quantile,a,b\n" + "".join(f"{q},0,{t}\n" for q, t in points))
    inline = drawn(LengthsScenario(quantiles=points, cap=900)).lengths(0)
    read = drawn(LengthsScenario(path=str(tmp_path / "q.csv"), column="b", cap=900)).lengths(0)
    assert (inline == read).all()
    assert np.median(inline) == pytest.approx(100, rel=0.1)
    assert (inline.min() >= 10, inline.max()) == (True, 900)
    for column, message in (("c", "no column 'c'"), ("a", None)):
        settings = LengthsScenario(path=str(tmp_path / "q.csv"), column=column, cap=900)
        if message:
            with pytest.raises(ScenarioError, match=message):
                drawn(settings)
        else:
            assert drawn(settings).lengths(0).max() == 1
    (tmp_path / "q.csv").write_text("quantile,a\n0.5,3\n0.1,4\n")
    with pytest.raises(ScenarioError, match="2 rows; allowed: at least 2, ascending"):
        drawn(LengthsScenario(path=str(tmp_path / "q.csv"), column="a", cap=9))


def test_lengths_are_read_as_traces_publish_them(tmp_path):
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    azure.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "".join(f"t,9,{n}\n" for n in (30, 10, 20)))
    lines = [{"timestamp": 0, "input_length": 9, "output_length": n, "hash_ids": [1]} for n in (30, 10, 20)]
    mooncake.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    inline = drawn(LengthsScenario(quantiles=((0.0, 10.0), (0.5, 20.0), (1.0, 30.0)), cap=99)).lengths(0)
    for path, column in ((azure, "GeneratedTokens"), (mooncake, "output_length")):
        assert (drawn(LengthsScenario(path=str(path), column=column, cap=99)).lengths(0) == inline).all()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "TIMESTAMP,GeneratedTokens\nt,1\nt,2\n", "no column 'tokens'; allowed: TIMESTAMP, GeneratedTokens"),
        ("a.csv", "tokens\n1\nmany\n", "row 2: tokens: value 'many'; allowed: a number from 0 on"),
        ("a.csv", "tokens\n1\n", "it has 1 row; allowed: at least 2"),
        ("a.csv", "", "it has no rows; allowed: at least 2"),
        ("a.jsonl", '{"output_length": 1}\n', "no column 'tokens'; allowed: output_length"),
        ("a.jsonl", '{"tokens": 1}\n{"tokens": -1}\n', "row 2: tokens: value '-1'"),
        ("a.jsonl", '{"tokens": 1}\n[]\n', "a line is no object; allowed: a JSON object in each"),
        ("a.jsonl", "{\n", "cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_of_lengths_is_named(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(ScenarioError, match=message):
        drawn(LengthsScenario(path=str(tmp_path / name), column="tokens", cap=9))


def test_lengths_drift_with_the_iterations():
    lengths = drawn(replace(LOGNORMAL, drift=0.1))
    assert np.median(lengths.lengths(5)) / np.median(lengths.lengths(0)) == pytest.approx(1.1**5, rel=0.1)


def test_every_epoch_has_each_prompt_once_in_an_order_of_its_own():
    lengths = drawn(LOGNORMAL, prompts_in_dataset=5000)
    seen = np.concatenate([lengths.prompts(k) for k in range(5)])
    assert sorted(seen[:5000]) == sorted(seen[5000:]) == list(range(5000))
    assert (seen[:5000] != seen[5000:]).any()
    assert (drawn(LOGNORMAL).prompts(1) == np.arange(2000, 4000)).all()


def test_a_prompt_changes_between_epochs_as_much_as_was_asked_for():
    # RLHFless: 70 % within 50 tokens, 90 % within 100; a normal change of 55 is between the two.
    lengths = drawn(replace(LOGNORMAL, rho=1.0, epoch_change_tokens=55.0), prompts_in_dataset=2000)
    by_prompt = [
        dict(zip(lengths.prompts(k).tolist(), lengths.lengths(k)[:, 0].tolist(), strict=True)) for k in range(2)
    ]
    changes = np.array([by_prompt[1][prompt] - by_prompt[0][prompt] for prompt in range(2000)])
    assert changes.std() == pytest.approx(55, rel=0.1)
    assert np.mean(np.abs(changes) <= 50) == pytest.approx(0.64, abs=0.05)


def test_the_draws_are_those_of_the_seed():
    assert (drawn(LOGNORMAL).lengths(3) == drawn(LOGNORMAL).lengths(3)).all()
    assert (drawn(LOGNORMAL).lengths(3) != drawn(LOGNORMAL).lengths(4)).any()


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.floats(0, 40),
    st.integers(0, 5),
    st.integers(0, 1000),
)
def test_every_turn_has_a_token_and_a_response_ends_with_one_of_its_own(lengths, answers, most, seed):
    tools = ToolsScenario(answers=answers, answers_max=most, answer_s=2.0)
    found = tool_answers(tools, np.array([lengths]), seed, 3)
    assert len(found) == len(lengths)
    for length, of_response in zip(lengths, found, strict=True):
        places = [answer.at_tokens for answer in of_response]
        assert len(places) <= most
        assert places == sorted(set(places))
        assert all(0 < place < length for place in places)
        assert all(answer.wait_s > 0 for answer in of_response)


def test_the_means_of_tools_are_what_was_asked_for_and_the_seed_decides():
    tools = ToolsScenario(answers=3.0, answer_s=2.0, sigma=0.8)
    found = tool_answers(tools, TOKENS, 5, 1)
    waits_s = [answer.wait_s for of_response in found for answer in of_response]
    assert len(waits_s) / TOKENS.size == pytest.approx(3.0, rel=0.05)
    assert np.mean(waits_s) == pytest.approx(2.0, rel=0.05)
    assert np.std(np.log(waits_s)) == pytest.approx(0.8, rel=0.05)
    assert np.mean([answer.at_tokens for each in found for answer in each]) == pytest.approx(200, rel=0.05)
    assert found == tool_answers(tools, TOKENS, 5, 1)
    assert found != tool_answers(tools, TOKENS, 6, 1)
    assert found != tool_answers(tools, TOKENS, 5, 2)
