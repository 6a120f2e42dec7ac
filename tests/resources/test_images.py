import pytest

from resources.images import checked_image


@pytest.mark.parametrize(
    "reference",
    ["gleaner:0.1.0", "ghcr.io/example/gleaner:main", "localhost:30000/a/b_c:1", "x/y@sha256:" + "0" * 64],
)
def test_references_with_a_tag_or_digest_pass(reference: str):
    assert checked_image(reference) == reference


@pytest.mark.parametrize(
    "reference", ["", "gleaner", "ghcr.io/example/gleaner", "localhost:30000/a", "a b:1", "x@sha256:12"]
)
def test_others_are_refused(reference: str):
    with pytest.raises(ValueError, match=r"image: value .*; allowed: registry/name:tag"):
        checked_image(reference)
