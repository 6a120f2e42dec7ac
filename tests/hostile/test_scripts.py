"""Scripts of other libraries that grow, loop or make no sense: read in no time, or refused in one line."""

from hypothesis import given
from hypothesis import strategies as st

from tasks.adopting.init_command import adopt
from tasks.configuration.run_config import ConfigError


def test_scripts_that_grow_without_bound_are_read_in_no_time(tmp_path):
    doubled = "\n".join(f"A{n + 1} = [A{n}, A{n}]" for n in range(200))
    file = tmp_path / "any.py"
    file.write_text(f"A0 = [1]\n{doubled}\nGRPOConfig(reward_weights=A200, beta=9 ** 9 ** 9, seed={'-' * 300}1)")
    adoption = adopt("trl", file)
    assert {"algorithm.kl_coef", "run.seed"} <= {*adoption.open}
    file.write_text("A = B\nB = A\nGRPOConfig(beta=A)")
    assert "algorithm.kl_coef" in adopt("trl", file).open


WORDS = st.sampled_from(
    ["LR", "=", "1e-5", "(", ")", ":", "\n", "GRPOConfig", "GRPOTrainer", "beta", ",", "args", ".", "def f", "[", "]",
     "class A", "lambda", "if", "else", "for", "in", "load_dataset", "'a/b'", "**", "*", "import", "from", "    ",
     "LoraConfig", "reward_funcs=", "train_dataset=", "peft_config=", "tools=", "model=", "f", "x"]
)  # fmt: skip


@given(words=st.lists(WORDS, max_size=25))
def test_whatever_a_script_says_it_is_read_or_refused_in_one_line(tmp_path_factory, words):
    file = tmp_path_factory.getbasetemp() / "any.py"
    file.write_text("GRPOConfig(beta=0.1)\n" + " ".join(words))
    try:
        adopt("trl", file)
        message = ""
    except ConfigError:
        raise
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
