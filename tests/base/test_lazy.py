"""Packages import their public names late, and suggest the nearest one for others."""

from __future__ import annotations

import pytest

import mbaas


def test_the_nearest_name_is_suggested_for_an_unknown_one():
    with pytest.raises(
        AttributeError, match=r"^module 'mbaas' has no attribute 'read_image'; did you mean 'read_images'\?$"
    ):
        _ = mbaas.read_image
    with pytest.raises(AttributeError, match=r"^module 'mbaas' has no attribute 'zzz'$"):
        _ = mbaas.zzz
