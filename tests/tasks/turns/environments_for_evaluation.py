"""An environment of held-out prompts; it is imported in a child process."""


class Drawer:
    """Holds one digit, and rewards the policy that looked once."""

    def reset(self, digit: int, **columns: object) -> str:
        self.digit, self.looks = digit, 0
        return "h"

    def look(self, key: str) -> str:
        """Look into the drawer.

        Args:
            key: What is written on it.
        """
        self.looks += 1
        return str(self.digit)

    def get_reward(self) -> float:
        return float(self.looks == 1)
