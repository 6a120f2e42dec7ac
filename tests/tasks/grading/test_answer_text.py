import pytest

from tasks.grading import answer_text
from tasks.grading.answer_limits import limited_time


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("so it is 4", []),
        (r"\boxed{4}", [("4",)]),
        (r"\boxed {4} and then \fbox{5}", [("5",), ("4", "5")]),
        (r"\boxed{4} is wrong, so \boxed{5}", [("5",), ("4", "5")]),
        ("\\boxed{4}\nThat is wrong.\n\\boxed{5}", [("5",)]),
        (r"$\boxed{4}$, $\boxed{5}$ and $\boxed{6}$", [("4", "5", "6")]),
        (r"\boxed{4} or \boxed{4}", [("4",)]),
        (r"$\boxed 72$.", [("72",)]),
        (r"\boxed{a\boxed{b}}", [(r"a\boxed{b}",)]),
        (r"\boxed{4} \boxed{5", []),
        (r"\boxed{5 <answer>4</answer>", []),
        ("<answer> 4\n</answer>", [("4",)]),
        ("<answer>4</answer> or <answer>5</answer>", [("5",)]),
        ("<answer>4</answer> and <answer>5", []),
        ("<answer>So the answer is 4.</answer>", [("4",)]),
        ("<answer>4</answer>\n#### 5", [("4",)]),
        ("<answer></answer>", []),
        ("#### 4\nSo the answer is 5.", [("5",)]),
        ("The answer is 5.\n#### 4", [("4",)]),
        ("The answer is 4.5. That is all.", [("4.5",)]),
        ("The answer is $x. y$. I hope so.", [("$x. y$",)]),
        ("**Final Answer:**\n\n4", [("4",)]),
        ("The answer to this is: 4\n5", [("4",)]),
        ("B: 3\nA: 4", [("4",)]),
        ("A: 4\nB: 3", []),
        ("Ans: 4", [("4",)]),
        ("Answer\uff1a 4", [("4",)]),
        ("The answer is B because A is 4.", [("B",)]),
        ("I don't think the answer is 4", []),
        ("I don\u2019t really think that the final answer is 4.", []),
        ("<answer>I don't think the answer is 4</answer>", []),
        ("The answer is 4. I doubt the answer is 4.", []),
        ("There is no doubt that the answer is 4.", [("4",)]),
        ("I am not sure, but the answer is 4.", [("4",)]),
        ("It is not 5, so the answer is 4.", [("4",)]),
        ("The answer is 4. Let me check if the answer is right.", [("4",)]),
        ("The answer", []),
        ("the answer is", []),
    ],
)
def test_an_answer_is_what_a_box_a_tag_a_marker_or_a_phrase_states(text: str, parts: list[tuple[str, ...]]):
    assert answer_text.stated(text) == parts


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("so\n#### 72", "72"),
        ("#### 7\nThis took 3 steps.", "7"),
        ("#### 7 This took 3 steps.", "7"),
        ("#### 7 cm", "7 cm"),
        ("#### **7**", "7"),
        ("####\n7", "7"),
        ("#### Final answer:\n7", "7"),
        ("#### 3 or 4", "3 or 4"),
        ("#### 7 2", "7 2"),
        ("#### 1 and then\n#### 2", "2"),
        ("####", ""),
    ],
)
def test_a_marker_states_the_rest_of_its_line_or_the_number_there(text: str, answer: str):
    assert answer_text.after_marker(text) == answer


@pytest.mark.parametrize(
    ("completion", "outside"),
    [
        ("a", "a"),
        ("<think>a</think>b", "b"),
        ("a</think>b", "b"),
        ("<think>a", ""),
        ("<think>a</think>b<think>c", "b"),
        ("<think>a</think><think>b</think>c", "c"),
    ],
)
def test_thoughts_are_no_answers(completion: str, outside: str):
    assert answer_text.outside_thinking(completion) == outside


def test_boxes_may_hold_braces_and_boxes():
    assert answer_text.stated(r"\boxed{\frac{1}{2}} \text{...} \boxed{\}}") == [(r"\}",)]
    assert answer_text.without_boxes(r"1 + \boxed{a\fbox{b}} + \boxed{c") == r"1 + ab + \boxed{c"


def test_blanks_behind_the_letter_of_an_answer_are_passed_once():
    with limited_time(10.0):
        assert answer_text.stated("A:" + " " * 60_000 + "\nnone") == []
