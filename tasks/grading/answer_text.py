r"""The text of an answer: which part of a completion or of a ground truth states it.

Pure functions of text. `answer_notation` rewrites the part's notation, and `answer_reading` reads the part's meaning.
"""

import re
from typing import NamedTuple

_THINKING = re.compile(r"<think>.*", re.DOTALL)
_BOX = re.compile(r"\\(?:boxed|fbox)\s*(?=\{)")
_BARE_BOX = re.compile(r"\\(?:boxed|fbox)[ \t]+([^\s${}]++)(?!\{)")
_BOXED = "\\boxed{"
# What may stand between the boxes of one list, and what does between boxes that may be one.
_SEPARATOR = re.compile(r"[\s$.,;&]*(?:,|;|\b(?:and|or)\b|\\text\{\s*(?:and|or)\s*\})[\s$]*")
_SEPARATED = re.compile(r"[,;]|\b(?:and|or)\b")
_BETWEEN_MAX = 70
_SENTENCE_MAX = 4_000
_OPEN, _CLOSE = re.compile(r"<\s*answer\s*>", re.IGNORECASE), re.compile(r"<\s*/\s*answer\s*>", re.IGNORECASE)
_MARKER = "####"
# A number at the beginning of a line, and after it the words of a sentence, which have other numbers.
_STATED = re.compile(
    r"([-+]?[$€£¥]?[-+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:/\d+)?%?)"
    r"[.,;:!]?\s+[(\u2013\u2014-]*\s*(?!or\b|and\b)[^\W\d_]{2}(?=.*\d)"
)
_HEADING = re.compile(r"[*_# \t]*(?:the\s+)?(?:final\s+)?answer[*_: \t]*", re.IGNORECASE)
# "The answer is", and GSM8K's "A:" where it begins the last line.
_PHRASE = re.compile(
    r"\banswers?\b(?:\s+(?:to|for|of)\s[^.:\n]{0,80}?)?[*_\"]{0,3}\s*"
    r"(?:[:\uff1a=]|\b(?:is|are|was|equals|would\s+be|must\s+be|should\s+be)\b(?:\s*[:\uff1a])?)|\bans\b\.?\s*[:\uff1a=]"
    r"|(?:^|\n)A:(?=[^\n]*+\s*\Z)|(?:^|\n)[*_# \t]*(?:final\s+)?answer[*_: \t]*\n",
    re.IGNORECASE,
)
# What stands before "the answer is" where the sentence denies it, or asks for it.
_NO_STATEMENT = re.compile(
    r"(?:(?P<denied>(?:n['\u2019]t|\bnot|\bnever|\bcannot|\bhardly)\s+(?:\w+\s+){0,2}?"
    r"(?:think|believe|sure|certain|say|mean|claim|agree|true|the\s+case|likely|possible|convinced)"
    r"|(?<!\bno )\bdoubt|\b(?:false|wrong|incorrect|untrue|unlikely|impossible|unsure))(?:\s+(?:that|if|whether))?"
    r"|\b(?:if|whether|unless|suppose|assume|assuming)(?:\s+that)?)"
    r"\s+(?:the|my|our|this|their|its?)?\s*(?:(?:final|correct|right)\s+)?\Z",
    re.IGNORECASE,
)
_BEFORE_MAX = 80
_REASON = re.compile(r"[\s,]+(?:because|since)\b.*", re.IGNORECASE | re.DOTALL)
_MATHEMATICS = re.compile(r"(\$\$?)(?:\\.|[^$\\])+\1|\\\((?:(?!\\\)).)+\\\)|\\\[(?:(?!\\\]).)+\\\]", re.DOTALL)
_SENTENCE_END = re.compile(r"(?<!\\)[.!?](?=\s|[*_\"]*\s|[*_\"]*\Z)|\n")


class Box(NamedTuple):
    """A box in a text.

    Attributes:
        content: The text in the box.
        begin: The index of the box's first character.
        end: The index after the box's last character.
    """

    content: str
    begin: int
    end: int


def outside_thinking(completion: str) -> str:
    """The text after the last `</think>`, up to a thought that begins there and has no end."""
    return _THINKING.sub("", completion.rpartition("</think>")[2])


def stated(text: str) -> list[tuple[str, ...]]:
    r"""The answers that `text` may state, most likely first, each as a single part or the parts of a list; [] for none.

    The answer is the last \boxed{} or \fbox{}, or all boxes of a list; without a box, the text between the last
    `<answer>` and `</answer>`; without tags, the text after the last "####" or "the answer is". If the last box or tag
    has no end, there is no answer.
    """
    boxes = _boxes(_with_plain_boxes(text))
    if boxes is not None:
        return _of_boxes(_with_plain_boxes(text), boxes)
    opened, closed = (list(tag.finditer(text)) for tag in (_OPEN, _CLOSE))
    if opened:
        content = text[opened[-1].end() : closed[-1].start()] if closed else ""
        content = content[: first.start()] if (first := _CLOSE.search(content)) else content
        said = _after_marker_or_phrase(content)
        text = content.strip() if said is None else said
    else:
        text = _after_marker_or_phrase(text) or ""
    return [(text,)] if text else []


def _after_marker_or_phrase(text: str) -> str | None:
    """The answer after the last "####" or "the answer is"; None without either; "" if the last phrase is denied."""
    phrase, is_denied = _last_phrase(text)
    if _MARKER in text and (phrase is None or text.rfind(_MARKER) > phrase.start()):
        return after_marker(text)
    if phrase is None:
        return None
    return "" if is_denied else _REASON.sub("", first_sentence(text[phrase.end() :]))


def _last_phrase(text: str) -> tuple[re.Match[str] | None, bool]:
    """The last "the answer is" outside conditions and questions, and whether the sentence denies the answer."""
    for phrase in reversed(list(_PHRASE.finditer(text))):
        before = _NO_STATEMENT.search(text[max(phrase.start() - _BEFORE_MAX, 0) : phrase.start()])
        if before is None or before.group("denied"):
            return phrase, before is not None
    return None, False


def after_marker(text: str) -> str:
    """The rest of the line after the last "####" (GSM8K), or the next line if the rest only says "Answer".

    If the line begins with a number that words and other numbers follow, the answer is the number.
    """
    lines = [line for line in text.rpartition(_MARKER)[2].strip().splitlines() if line.strip()]
    lines = lines[1:] if lines and _HEADING.fullmatch(lines[0]) else lines
    line = lines[0].strip("*_` \t") if lines else ""
    begun = _STATED.match(line)
    return begun.group(1) if begun else line


def first_sentence(text: str) -> str:
    """The first sentence or line of `text`; points and line ends within mathematics end none."""
    text = text[:_SENTENCE_MAX].lstrip(" \t\r\n*_:\uff1a=")
    spans = [found.span() for found in _MATHEMATICS.finditer(text)]
    for end in _SENTENCE_END.finditer(text):
        if not any(begin < end.start() < close - 1 for begin, close in spans):
            return text[: end.start()].strip()
    return text.strip()


def without_boxes(content: str) -> str:
    r"""Replace each \boxed{} by its content."""
    text, place = _with_plain_boxes(content), -1
    while (place := text.find(_BOXED)) >= 0:
        end = _closing(text, place + len(_BOXED))
        if end is None:
            break
        text = text[:place] + text[place + len(_BOXED) : end] + text[end + 1 :]
    return text


def _with_plain_boxes(text: str) -> str:
    r"""Rewrite every form of a box as `\boxed{...}`."""
    text = _BARE_BOX.sub(lambda box: f"{_BOXED}{box.group(1).rstrip('.,;')}}}", text)
    return _BOX.sub(r"\\boxed", text)


def _boxes(text: str) -> list[Box] | None:
    """The outermost boxes of a text; None without boxes, and [] if the last box has no end."""
    if _BOXED not in text:
        return None
    boxes: list[Box] = []
    start = text.find(_BOXED)
    while start >= 0:
        end = _closing(text, start + len(_BOXED))
        if end is None:
            return []
        boxes.append(Box(text[start + len(_BOXED) : end], start, end + 1))
        start = text.find(_BOXED, end)
    return boxes


def _of_boxes(text: str, boxes: list[Box]) -> list[tuple[str, ...]]:
    r"""The answers of boxes: the last box, which corrects earlier boxes, or a list such as `\boxed{1}, \boxed{2}`."""
    if not boxes:
        return []
    group, is_list = [boxes[-1].content], True
    for box, after in zip(reversed(boxes[:-1]), reversed(boxes[1:]), strict=True):
        between = text[box.end : after.begin]
        is_separator = _SEPARATOR.fullmatch(between) is not None
        if not is_separator and (len(between) > _BETWEEN_MAX or not _SEPARATED.search(between)):
            break
        is_list = is_list and is_separator
        group.insert(0, box.content)
    parts, last = tuple(dict.fromkeys(group)), (boxes[-1].content,)
    return [parts] if is_list else [last, parts]


def _closing(text: str, begin: int) -> int | None:
    """The index of the brace that closes the group whose content begins at `begin`; None without a closing brace."""
    depth, index = 1, begin
    while index < len(text):
        if text[index] == "\\":
            index += 1
        elif text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if not depth:
                return index
        index += 1
    return None
