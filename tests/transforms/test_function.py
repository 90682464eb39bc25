"""Map validates its function and identifies it by its code and constants."""

from __future__ import annotations

import functools
import threading
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image

from mbaas import transforms as T
from mbaas.errors import ConfigError


def identity(fn):
    return T.Pipeline([T.DecodeImage(), T.Map(fn)]).fingerprint


def brighten(image, rng):
    return image + np.uint8(1)


class Add:
    def __init__(self, value):
        self.value = value

    def __call__(self, image, rng):
        return image + self.value


def adder(value, *, scale=1):
    return lambda image, rng: image * scale + value


def added(value, image, rng, *, scale=1):
    return image * scale + value


def countdown(depth):
    def recurse(image, rng):
        return recurse(image, rng) if depth else image

    return recurse


def test_a_function_that_does_not_pickle_is_refused():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"must pickle.*but .*<lambda> does not: .*lock"):
        T.Map(lambda image, rng: image if lock else None)


def test_the_repr_names_the_function():
    assert repr(T.Map(brighten)).endswith("test_function.brighten)")


@pytest.mark.parametrize(
    "make",
    [
        lambda: brighten,
        lambda: adder(3),
        lambda: adder(np.arange(3)),
        lambda: adder({"a": [1, 2], "b": {3}}),
        lambda: Add(4),
        lambda: Add(4).__call__,
        lambda: functools.partial(added, 5),
        lambda: np.rot90,
        lambda: countdown(2),
        lambda: adder(brighten),
    ],
)
def test_the_same_function_made_twice_has_one_fingerprint(make):
    assert identity(make()) == identity(make())


def test_code_constants_defaults_closure_and_state_all_count():
    def one(image, rng):
        return image + 1

    def one_again(image, rng, by=1):
        return image + by

    def two_again(image, rng, by=2):
        return image + by

    made = [one, one_again, two_again, adder(3), adder(4), adder(3, scale=2), adder(np.arange(3)), adder(3.0)]
    made += [
        adder(np.arange(3, dtype=np.int32)),
        Add(3),
        Add(4),
        Add(3).__call__,
        functools.partial(added, 3),
    ]
    made += [
        functools.partial(added, 3, scale=2),
        countdown(0),
        countdown(1),
        adder("3"),
        adder(brighten),
        np.rot90,
    ]
    prints = [identity(fn) for fn in made]
    assert len(set(prints)) == len(prints)


def defined(body, constant):
    """Function ``f`` of this module with the given body, as after an edit of its source."""
    space = {"__name__": __name__, "CONSTANT": constant}
    exec(f"def f(image, rng):\n    return {body}", space)
    return space["f"]


def test_an_edit_inside_a_function_counts_and_a_global_it_reads_does_not():
    bodies = [
        "image + 1",
        "image + 2",
        "image - 1",
        "image + CONSTANT",
        "image + OTHER",
        "(lambda: image + 1)()",
    ]
    prints = [identity(defined(body, 0)) for body in [*bodies, "(lambda: image + 2)()"]]
    assert len(set(prints)) == len(prints)
    assert identity(defined("image + CONSTANT", 0)) == identity(defined("image + CONSTANT", 1))


def test_a_function_that_uses_a_name_without_a_value_is_named():
    """Python keeps such a name in an empty cell; its own error is "Cell is empty"."""

    def brighter(image, rng):
        return image + later

    pipeline = T.Pipeline([T.DecodeImage(), T.Map(brighter)])
    with pytest.raises(ConfigError, match=r"brighter uses 'later' of the function around it, which has no value yet"):
        _ = pipeline.fingerprint
    later = 1
    assert pipeline.fingerprint


def test_a_value_that_holds_itself_is_refused_with_a_reason():
    loop: list[object] = []
    loop.append(loop)
    with pytest.raises(ConfigError, match="refers to itself"):
        T.Map(adder(loop)).identity()


def turned(image):
    return np.rot90(image)


def test_a_deterministic_function_is_another_transform_than_the_same_with_a_generator():
    assert repr(T.Map(turned, deterministic=True)).endswith("test_function.turned, deterministic=True)")
    assert T.Map(np.sort, deterministic=True).identity() != T.Map(np.sort).identity()
    fields = T.Map(np.sort, fields=["label"], deterministic=True)
    assert repr(fields) == "Map(numpy.sort, fields=['label'], deterministic=True)"


def test_what_is_left_out_changes_no_fingerprint():
    """Saved states contain fingerprints, so they stay as they were before ``deterministic`` existed."""
    assert T.Map(brighten).identity() == T.Map(brighten, deterministic=False).identity()
    assert "deterministic" not in T.Map(brighten).identity() + repr(T.Map(brighten))


@pytest.mark.parametrize("value", [1, "true", None])
def test_deterministic_is_true_or_false(value):
    with pytest.raises(ConfigError, match=f"^Map's deterministic must be true or false, got {value!r}$") as raised:
        T.Map(brighten, deterministic=value)
    assert raised.value.option == "deterministic"


@pytest.mark.parametrize(
    ("fn", "takes"),
    [
        (brighten, r"brighten takes \(image, rng\)"),
        (Add(1), r"Add takes \(image, rng\)"),
        (lambda: 1, r"<lambda> takes \(\)"),
        (lambda image, *, by: image, r"<lambda> takes \(image, \*, by\)"),
    ],
)
def test_a_deterministic_function_takes_the_sample_alone(fn, takes):
    with pytest.raises(
        ConfigError, match=rf"^a deterministic Map calls fn\(image\), without a generator, but .*{takes}"
    ):
        T.Map(fn, deterministic=True)


@pytest.mark.parametrize(
    ("fn", "takes"), [(turned, r"turned takes \(image\)"), (lambda image, rng, by: image, r"takes \(image, rng, by\)")]
)
def test_a_function_that_is_not_deterministic_takes_the_sample_and_a_generator(fn, takes):
    with pytest.raises(
        ConfigError, match=rf"^Map calls fn\(image, rng\), and fn\(image\) if deterministic=True, .*{takes}"
    ):
        T.Map(fn)


@pytest.mark.parametrize("fn", [turned, np.abs, lambda image, by=2: image, functools.partial(np.roll, shift=1)])
def test_a_deterministic_function_may_have_more_parameters_with_defaults(fn):
    assert T.Map(fn, deterministic=True).deterministic


class Slotted:
    __slots__ = ("value",)

    def __init__(self, value):
        self.value = value


class AlsoWithADict(Slotted):
    pass


class WithoutItsLock:
    def __init__(self, value):
        self.value, self.lock = value, threading.Lock()

    def __getstate__(self):
        return {"value": self.value}


def grey(value):
    return Image.new("L", (2, 2), value)


@pytest.mark.parametrize("kind", [grey, AlsoWithADict, WithoutItsLock, Fraction, lambda value: torch.tensor([value])])
def test_the_identity_sees_all_state_of_an_object_that_pickles(kind):
    def using(value):
        held = kind(value)
        return identity(lambda image, rng: held)

    assert using(1) == using(1) != using(2)
