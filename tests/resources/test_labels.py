"""The rules are those of Kubernetes; tests/hostile/test_check.py has what they refuse in a configuration."""

import pytest

from resources.labels import check_label, check_label_value, is_spot_label, url_label


@pytest.mark.parametrize(
    "label", ["a", "A_b.c-9", "x" * 63, "nvidia.com/gpu", "a-b.c/d", "x" * 63 + "." + "y" * 63 + "/a"]
)
def test_names_of_labels(label):
    assert check_label("node_selector", label) is None


@pytest.mark.parametrize(
    "label",
    ["", "/a", "a/", "a/b/c", "-a", "a-", "a b", "x" * 64, "A.com/x", ".a/x", "a..b/x", "a_b/x", "\u00e9", "a\n"],
)
def test_what_is_no_name_of_a_label(label):
    with pytest.raises(ValueError, match=r"^node_selector: label "):
        check_label("node_selector", label)


@pytest.mark.parametrize("value", ["", "a", "True", "1.5", "x" * 63])
def test_values_of_labels(value):
    assert check_label_value("f", value) is None


@pytest.mark.parametrize("value", ["a b", "-", "a/b", "x" * 64, "_a", "a."])
def test_what_is_no_value_of_a_label(value):
    with pytest.raises(ValueError, match=r"^f: value "):
        check_label_value("f", value)


@pytest.mark.parametrize(
    ("label", "value", "expected"),
    [
        ("cloud.google.com/gke-spot", "true", True),
        ("cloud.google.com/gke-spot", "false", False),
        ("cloud.google.com/gke-preemptible", "true", True),
        ("eks.amazonaws.com/capacityType", "SPOT", True),
        ("eks.amazonaws.com/capacityType", "ON_DEMAND", False),
        ("karpenter.sh/capacity-type", "spot", True),
        ("kubernetes.azure.com/scalesetpriority", "spot", True),
        ("node.kubernetes.io/lifecycle", "spot", True),
        ("pool", "gpu-spot-a", True),
        ("pool", "spotlight", False),
        ("cloud.google.com/gke-accelerator", "nvidia-l4", False),
    ],
)
def test_labels_of_spot_machines(label, value, expected):
    assert is_spot_label(label, value) == expected


def test_the_label_of_a_url_is_a_label_and_tells_urls_apart():
    urls = [
        "s3://bucket/runs/math",
        "s3://other/runs/math",
        "runs/a b",
        "memory://",
        "s3://b/" + "x" * 300,
        "s3://b/---",
    ]
    labels = [url_label(url) for url in urls]
    assert len(set(labels)) == len(urls)
    assert labels[0].startswith("math-")
    assert url_label("s3://bucket/runs/math/") == labels[0]
    for label in labels:
        check_label_value("run", label)
