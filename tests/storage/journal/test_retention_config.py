"""What may be said about retention, and that saying something else later is the same run."""

import pytest

from storage.journal.retention_config import RetentionConfig
from tasks.configuration.run_config import ConfigError, digest, parse

MINIMAL = {
    "run": {"url": "memory://x"},
    "policy": {"path": "model"},
    "data": {"source": "arithmetic"},
    "rewards": [{"function": "arithmetic"}],
}


def test_what_is_kept_is_no_part_of_a_runs_identity():
    changed = parse(MINIMAL | {"retention": {"compact": False, "keep_weights": 9}})
    assert changed.retention == RetentionConfig(compact=False, keep_weights=9)
    assert digest(changed) == digest(parse(MINIMAL))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("keep_weights", 1, "greater than or equal to 2"),
        ("keep_checkpoints", 0, "greater than or equal to 1"),
        ("compact", "yes", "valid boolean"),
        ("keep_everything", True, "unknown field"),
    ],
)
def test_what_would_lose_something_is_refused(field, value, message):
    with pytest.raises(ConfigError, match=rf"retention\.{field}: .*{message}"):
        parse(MINIMAL | {"retention": {field: value}})
