import pytest

from resources.accelerators import ACCELERATORS, accelerator
from resources.prices import PRICES


def test_every_machine_of_the_price_table_has_an_accelerator_with_a_data_sheet():
    assert {accelerator(price.accelerator).name for price in PRICES} == {price.accelerator for price in PRICES}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("nvidia-h100", "H100-80GB"),
        ("NVIDIA H100", "H100-80GB"),
        ("nvidia-tesla-a100", "A100-40GB"),
        ("nvidia-a100-80gb", "A100-80GB"),
        ("nvidia-l4", "L4"),
        ("l40s", "L40S"),
        ("A10G", "A10G"),
    ],
)
def test_names_of_flyte_and_of_people_are_understood(written: str, name: str):
    assert accelerator(written).name == name


def test_an_unknown_one_is_named_with_those_that_are_known():
    with pytest.raises(LookupError, match=r"accelerator: value 'tpu-v5'; allowed: H100-80GB, H200, .*H800"):
        accelerator("tpu-v5")


def test_names_are_not_ambiguous_and_figures_have_sources():
    names = [name.lower() for each in ACCELERATORS for name in (each.name, *each.also)]
    assert len(set(names)) == len(names)
    assert all(each.source and each.as_of for each in ACCELERATORS)


def test_figures_are_dense_and_in_the_units_they_say():
    h100, l4 = accelerator("h100"), accelerator("l4")
    assert (h100.memory_bytes, h100.bandwidth_bytes_per_s, h100.flops) == (80e9, 3.35e12, 989.4e12)
    # Arithmetic per byte at which a data sheet is balanced: some hundreds, for all of them but the cut-down one.
    assert h100.flops / h100.bandwidth_bytes_per_s == pytest.approx(295, abs=1)
    assert l4.flops / l4.bandwidth_bytes_per_s == pytest.approx(403, abs=1)
    assert all(30 < each.flops / each.bandwidth_bytes_per_s < 500 for each in ACCELERATORS)
