"""Results of calls that are longer than allowed: how they are cut, and how a cut one is compared."""

CUT_MARK = "\n[cut: the result is longer than allowed]"


def cut(result: str, characters: int) -> str:
    """The first `characters` of a result, marked as cut; one that was cut before keeps one mark."""
    return result.removesuffix(CUT_MARK)[:characters] + CUT_MARK


def same_result(recorded: str, result: str) -> bool:
    """Whether a call that is made again gives what was recorded, which may have been cut."""
    if recorded == result:
        return True
    return recorded.endswith(CUT_MARK) and result.startswith(recorded.removesuffix(CUT_MARK))
