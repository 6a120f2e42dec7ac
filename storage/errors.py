"""The errors that reach a user, as one tree: `except GleanerError` catches every class of the tree.

    GleanerError
      WrongInputError     a configuration, scenario, prompt, model or argument that cannot be used; also a ValueError
      StorageError        the store, and the bytes in the store (storage/stores/store.py)
      EngineError         an engine refused a request, or died (tasks/sampling/engines/engine.py)
      UserCodeError       a reward function, tool or environment of the user's

Directly below GleanerError stand the errors that end an iteration or a run: CrewLost, GroupTimeout, NonFiniteGradient,
IntegrityError, TrainingFailed and a dozen more. Each error keeps its class of the standard library as a second base:
GroupTimeout is a TimeoutError, CorruptObject a ValueError. A function with one wrong argument raises a plain ValueError
or LookupError. `resources/` and `workflows/` must not import storage: errors of prices, spot traces and documents are
plain ValueErrors, and MachineTooSmall is a RuntimeError.

Signals between Gleaner's own parts, such as Preempted, are not in the tree; no user sees one.
"""


class GleanerError(Exception):
    """The root of the errors that reach a user; the message says what is wrong and what is allowed."""


class WrongInputError(GleanerError, ValueError):
    """A file, setting, model or argument of the user's cannot be used; the message names the place and the value."""


class UserCodeError(GleanerError):
    """A reward function, tool or environment of the user's cannot be loaded or called, or failed."""
