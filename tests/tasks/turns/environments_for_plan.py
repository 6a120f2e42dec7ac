"""Tools and environments that tests name in configurations; they are imported in child processes."""

import sys


class Maze:
    """An environment whose beginning depends on the row and on the seed."""

    def reset(self, size: int, seed: int, **columns: object) -> str | None:
        self.size = size
        return f" The maze has {size} rooms and the seed {seed}; {len(columns['prompt'])} messages." if size else None

    def go(self, room: int) -> str:
        """Go to a room.

        Args:
            room: Its number.
        """
        return f"{room} of {self.size}"

    def close(self) -> None:
        sys.stdout.write("what a tool prints disturbs nothing\n")


class Untold(Maze):
    def go(self, room):
        return room


class Walled(Maze):
    def reset(self, size: int, seed: int, **columns: object) -> str | None:
        if not size:
            raise ValueError("a maze without a room")
        return super().reset(size, seed, **columns)


class Broken(Maze):
    def __init__(self) -> None:
        raise OSError("no server")


def look(room: int) -> str:
    """Look into a room.

    Args:
        room: Its number.
    """
    return f"room {room}"
