"""The feed file for recognised data, with comments on what to change."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml

from mbaas.tools.recognize.kinds import Feed, Step, mapped

BATCH = 64


def feed_file(
    feed: Feed, *, name: str, folder: Path, file: Path, is_validation: bool = False, has_validation: bool = False
) -> str:
    """Return the text of a feed file.

    Args:
        feed: the recognised data and pipeline.
        name: name of the feed.
        folder: the folder that was looked at.
        file: the feed file to be written; paths are relative to its folder where that is shorter.
        is_validation: the feed is for validation: no random transforms, and not shuffled.
        has_validation: another file serves the data for validation.
    """
    data = mapped(feed.data, lambda path: _from(file, folder / path))
    has_images = feed.steps[0].name == "DecodeImage"
    show = f"  mbaas show {file.name}: the first minibatch as a picture." if has_images else ""
    lines = [
        f"# Written by mbaas init for {feed.what}.",
        f"# mbaas check {file.name}: are all samples good?{show}",
        f"# mbaas serve {file.name}: start the feed.  mbaas serve --schema: all keys, also for your editor.",
        "",
        f"name: {_inline(name)}  # trials join the feed by this name: mbaas.join({name!r})",
        *(f"# {hint}" for hint in feed.hints),
        *_block("data", data),
        *([] if is_validation or has_validation else [_SPLIT]),
        f"batch_size: {BATCH}  # samples in a minibatch; trials may choose another size",
        "",
        "pipeline:  # applied to each sample, in this order",
        *(_step(step) for step in (feed.plain if is_validation else feed.steps)),
        "",
        *(f"{key}: {_inline(value)}" for key, value in feed.keys.items()),
        "shuffle: false  # the order of the data, in every epoch"
        if is_validation
        else "seed: 0  # determines the order and the random transforms",
        "# on_bad_sample: skip  # leave out and count samples that cannot be prepared; default: an error in trials",
        "# cache_bytes: 4 GiB  # memory for samples on each node; default: their size, up to half of the free memory",
        "# prep_workers: 4  # default: half of the free CPUs",
    ]
    return "\n".join(lines) + "\n"


_SPLIT = "# split: {part: train, fraction: 0.9, seed: 0}  # a second file with part: validation serves the rest"


def _from(file: Path, path: Path) -> str:
    """Return a path for the file: relative if it is below the file's folder or next to it."""
    whole, here = os.path.abspath(path), os.path.abspath(file.parent)  # noqa: PTH100 (links stay)
    relative = os.path.relpath(whole, here)
    return whole if relative.startswith("../..") else relative


def _block(key: str, value: Any) -> list[str]:
    if not isinstance(value, dict):
        return [f"{key}: {_inline(value)}"]
    text = yaml.safe_dump({key: value}, sort_keys=False, default_flow_style=False, allow_unicode=True, width=1000)
    return text.rstrip().splitlines()


def _inline(value: Any) -> str:
    text = yaml.safe_dump(value, sort_keys=False, default_flow_style=True, allow_unicode=True, width=10_000)
    return text.removesuffix("...\n").strip()


def _step(step: Step) -> str:
    text = f"- {step.name}" + ("" if step.value is None else f": {_inline(step.value)}")
    return f"  {'# ' if step.is_off else ''}{text}" + (f"  # {step.comment}" if step.comment else "")
