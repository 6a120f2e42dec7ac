"""RunConfig: the whole configuration of a run, composed of the dataclasses that live next to the code they configure.

Reading is strict: an unknown field is refused with its path. There is no global state.
"""
