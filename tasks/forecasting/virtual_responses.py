"""The responses of one iteration: their lengths, what is journalled of each and by which life, and what has ended."""

from collections.abc import Sequence

from storage.records import SlotPlan
from tasks.forecasting.response_lengths import Ints
from tasks.forecasting.virtual_ledger import Life


class Responses:
    """Responses by number, as in a plan: response r is sample r % num_generations of group r // num_generations.

    Every decoded token is in the end either kept or wasted, and is counted for the life that decoded it.
    """

    def __init__(self, lengths: Ints, slots: Sequence[SlotPlan]) -> None:
        groups, generations = int(lengths.shape[0]), int(lengths.shape[1])
        self.length: list[int] = lengths.ravel().tolist()
        self.kept = [0.0] * len(self.length)
        self.generations = generations
        self.left = len(self.length)
        self.group_left = [generations] * groups
        self.group_tokens: list[int] = lengths.sum(axis=1).tolist()
        self.unit = [0] * len(self.length)
        self.of_unit: dict[int, tuple[int, ...]] = {}
        for slot in slots:
            samples = tuple(group * generations + k for group in slot.groups for k in range(generations))
            self.of_unit[slot.slot] = samples
            for response in samples:
                self.unit[response] = slot.slot
        self.unit_left = {unit: len(samples) for unit, samples in self.of_unit.items()}
        self._ended = bytearray(len(self.length))
        self._parts: dict[int, list[tuple[Life, float]]] = {}

    def ended(self, response: int) -> bool:
        return bool(self._ended[response])

    def group(self, response: int) -> int:
        return response // self.generations

    def keep(self, response: int, life: Life, tokens: float) -> None:
        """Count this many more of the response's tokens as journalled."""
        life.decoded += tokens
        self.kept[response] += tokens
        self._parts.setdefault(response, []).append((life, tokens))

    def waste(self, life: Life, tokens: float) -> None:
        """Count this many tokens as decoded for nothing."""
        life.decoded += tokens
        life.wasted += tokens

    def begin_again(self, response: int) -> None:
        """Discard all tokens of the response: it begins again from its prompt."""
        for life, tokens in self._parts.pop(response, ()):
            life.wasted += tokens
        self.kept[response] = 0.0

    def end(self, response: int, life: Life) -> bool:
        """The response has its last token; returns whether its group is now complete."""
        life.decoded += self.length[response] - self.kept[response]
        self.kept[response] = float(self.length[response])
        self._parts.pop(response, None)
        self._ended[response] = 1
        self.left -= 1
        self.unit_left[self.unit[response]] -= 1
        self.group_left[self.group(response)] -= 1
        return self.group_left[self.group(response)] == 0
