"""Mutants that change nothing which anybody could see, each with the reason; they count neither way."""

from __future__ import annotations

EQUIVALENT: dict[str, str] = {}
"""Key of a mutant (`mbaas.core.window Window.fits: a <= b -> a < b`) -> why it is equivalent."""
