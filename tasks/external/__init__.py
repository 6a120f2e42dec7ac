"""An external trainer: another program takes finished groups from a run, and publishes weight versions."""
