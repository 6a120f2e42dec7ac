"""RunConfig: the whole configuration of a run, composed of the dataclasses that live next to the code they configure.

Reading is strict: what is not understood is refused with the path of the field. No global state.
"""
