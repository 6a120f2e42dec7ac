"""Weights that are pulled while the engine starts."""

import threading

import numpy as np
import pytest

from storage.clock import SystemClock
from storage.records import layout
from storage.stores.memory import MemoryStore
from storage.weights.tensor_sets import TensorBlock, publish
from tasks.sampling.session.pulled_model import WeightSource

VALUES = np.arange(12, dtype=np.float32)


def no_notice():
    pass


class Held(MemoryStore):
    """Holds weights; answers requests for them only when it is let go, and tells when the first one came."""

    def __init__(self):
        super().__init__("held")
        self.asked, self.let_go = threading.Event(), threading.Event()
        self.let_go.set()
        with_weights(self)
        self.asked.clear()
        self.let_go.clear()

    def get(self, key, start=0, end=None):
        if key.startswith(layout.weights(0)):
            self.asked.set()
            assert self.let_go.wait(60)
        return super().get(key, start, end)


def with_weights(store):
    publish(store, layout.weights(0), {"w": TensorBlock("F32", (12,), VALUES.tobytes())}, {})
    return store


def test_the_tensors_are_given_once():
    with WeightSource(with_weights(MemoryStore("m")), None, SystemClock(), ahead=0) as ahead:
        tensors = ahead.take(0, no_notice)
        assert bytes(tensors["w"].data) == VALUES.tobytes()
        assert ahead.take(0, no_notice) is None


def test_a_version_that_is_not_wanted_is_not_kept():
    with WeightSource(with_weights(MemoryStore("m")), None, SystemClock(), ahead=0) as ahead:
        assert ahead.take(1, no_notice) is None
        assert ahead.take(0, no_notice) is None


def test_what_cannot_be_pulled_is_left_to_the_session():
    with WeightSource(MemoryStore("empty"), None, SystemClock(), ahead=0) as ahead:
        assert ahead.take(0, no_notice) is None


class Told(Exception):  # noqa: N818 - reads as what happened
    """A notice has come."""


def test_a_notice_ends_the_waiting():
    def notice():
        store.let_go.set()
        raise Told

    store = Held()
    with WeightSource(store, None, SystemClock(), ahead=0) as ahead, pytest.raises(Told):
        ahead.take(0, notice)


def test_a_member_that_leaves_gives_the_pull_up():
    store = Held()
    with WeightSource(store, None, SystemClock(), ahead=0) as ahead:
        assert store.asked.wait(60)
        threading.Timer(0.2, store.let_go.set).start()
    assert ahead.take(0, no_notice) is None
