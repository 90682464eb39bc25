"""Records that trials write during training, as JSON lines in one file per process.

A killed trial continues in another process after its last recorded minibatch. A line contains a minibatch's samples and
the loader state after it, so neither exists without the other. If a process was believed dead and kept writing, its
extra minibatches are not used, as in a real search.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field, TypeAdapter, ValidationError
from typing_extensions import NotRequired, TypedDict

from mbaas.errors import ConfigError
from mbaas.tools.chaos.checker import Delivery

SUFFIX = ".jsonl"
_DIGEST_BYTES = 8


@dataclass(frozen=True)
class Step:
    """One recorded minibatch, and the loader state after it.

    ``asked_at`` and ``got_at`` are times of request and receipt, in seconds of the machine's monotonic clock.
    """

    delivery: Delivery
    asked_at: float
    got_at: float
    state: Mapping[str, Any]


@dataclass(frozen=True)
class Incarnation:
    """The record of one process of a trial.

    Attributes:
        builds_on: number of earlier minibatches that the process continues from.
        steps: its own minibatches.
        errors: exceptions raised by the loader: (time, class, message).
        is_closed: the trial ended regularly, at the end of an epoch.
    """

    trial: str
    pid: int
    builds_on: int
    steps: tuple[Step, ...] = ()
    errors: tuple[tuple[float, str, str], ...] = ()
    is_closed: bool = False


def history(incarnations: Sequence[Incarnation]) -> list[Step]:
    """Return the minibatches that count, from all processes of a trial in order."""
    steps: list[Step] = []
    for incarnation in incarnations:
        del steps[incarnation.builds_on :]
        steps += incarnation.steps
    return steps


@dataclass
class Writer:
    """Writes a trial's file, each line at once, so that it survives the process.

    `state` is the loader state to continue from; None at the start of the trial. `pipeline` is the number of the
    pipeline that the loader had then.
    """

    trial: str
    _descriptor: int
    state: Mapping[str, Any] | None
    pipeline: int = 0

    @classmethod
    def open(cls, folder: Path, trial: str) -> Writer:
        """Open a new file that continues the records of the trial's earlier processes."""
        steps = history(read(folder, trial).get(trial, []))
        path = folder / f"{trial}.{len(_paths(folder, trial))}{SUFFIX}"
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC)
        last = steps[-1] if steps else None
        writer = cls(trial, descriptor, last.state if last else None, last.delivery.pipeline if last else 0)
        writer._write({"trial": trial, "pid": os.getpid(), "builds_on": len(steps)})
        return writer

    def step(self, batch: Mapping[str, Any], state: Mapping[str, Any], *, asked_at: float, got_at: float) -> None:
        """Record a minibatch of NumPy arrays, and the loader state after it."""
        rows = zip(batch["image"], batch["label"], strict=True)
        line = {
            "epoch": state["feed_epoch"],
            "ids": batch["sample_id"].tolist(),
            "digests": [_digest(image, label) for image, label in rows],
            "asked_at": asked_at,
            "got_at": got_at,
            "state": state,
            "pipeline": self.pipeline,
        }
        self._write(line)
        self.state = state

    def nothing(self, state: Mapping[str, Any]) -> None:
        """Record an epoch without any minibatch, and the loader state after it."""
        now = time.monotonic()
        self.step({"image": (), "label": (), "sample_id": np.empty(0, np.int64)}, state, asked_at=now, got_at=now)

    def error(self, error: BaseException) -> None:
        self._write({"error": type(error).__name__, "message": str(error), "at": time.monotonic()})

    def close(self) -> None:
        self._write({"closed": True})
        os.close(self._descriptor)

    def _write(self, line: Mapping[str, Any]) -> None:
        os.write(self._descriptor, (json.dumps(line) + "\n").encode())


def _digest(image: Any, label: Any) -> str:
    content = hashlib.blake2b(np.ascontiguousarray(image).data, digest_size=_DIGEST_BYTES)
    content.update(int(label).to_bytes(8, "little", signed=True))
    return content.hexdigest()


def read(folder: Path, trial: str | None = None) -> dict[str, list[Incarnation]]:
    """Read the records of all trials, or of one; a trial's processes are in order.

    Raises:
        ConfigError: a file has an invalid line; the message contains its number.
    """
    found: dict[str, list[Incarnation]] = {}
    for path in sorted(_paths(folder, trial), key=_number):
        if (incarnation := _parse(path)) is not None:
            found.setdefault(incarnation.trial, []).append(incarnation)
    return found


def newest(folder: Path, name: str) -> int:
    """Return the number K of the newest trial "name.K", plus one if that trial has ended regularly."""
    numbers = [int(path.name.split(".")[1]) for path in _paths(folder, f"{name}.*")]
    number = max(numbers, default=0)
    processes = read(folder, f"{name}.{number}").get(f"{name}.{number}", [])
    return number + bool(processes and processes[-1].is_closed)


def _paths(folder: Path, trial: str | None) -> list[Path]:
    # "[" in a rank's name would start a character set.
    pattern = f"{trial.replace('[', '[[]')}.*" if trial is not None else "*"
    return list(folder.glob(f"{pattern}{SUFFIX}"))


def _number(path: Path) -> int:
    number = path.name.removesuffix(SUFFIX).rpartition(".")[2]
    if not number.isdecimal():
        raise ConfigError(f"{path}: a record must be called 'trial.number{SUFFIX}'")
    return int(number)


def _parse(path: Path) -> Incarnation | None:
    """Read one file, without an unfinished last line. None if the writer died before its first line."""
    lines = path.read_bytes().split(b"\n")[:-1]
    if not lines:
        return None
    head = _checked(_HEAD, path, 1, lines[0])
    rest = [_checked(_LINE, path, number, line) for number, line in enumerate(lines[1:], 2)]
    steps = []
    for number, line in enumerate(rest, 2):
        if "ids" in line:
            if len(line["ids"]) != len(line["digests"]):
                raise ConfigError(
                    f"{path}:{number}: a minibatch must have a digest for each of {len(line['ids'])} samples, got "
                    f"{len(line['digests'])}"
                )
            rows, state = tuple(zip(line["ids"], line["digests"], strict=True)), line["state"]
            order, begin = _order(line["epoch"], state), state.get("begin", 0)
            delivery = Delivery(line["epoch"], rows, order, begin, line.get("pipeline", 0))
            steps.append(Step(delivery, line["asked_at"], line["got_at"], state))
    return Incarnation(
        **head,
        steps=tuple(steps),
        errors=tuple((line["at"], line["error"], line["message"]) for line in rest if "error" in line),
        is_closed=any("closed" in line for line in rest),
    )


def _order(epoch: int, state: Mapping[str, Any]) -> str:
    levels = state.get("shuffle", [])
    return "" if levels in ([], [[epoch, []]]) else json.dumps(levels)


class _Head(TypedDict):
    trial: str
    pid: int
    builds_on: Annotated[int, Field(ge=0)]


class _Made(TypedDict):
    epoch: int
    ids: list[int]
    digests: list[str]
    asked_at: float
    got_at: float
    state: dict[str, Any]
    pipeline: NotRequired[int]


class _Raised(TypedDict):
    error: str
    message: str
    at: float


class _Closed(TypedDict):
    closed: bool


_HEAD: TypeAdapter[Any] = TypeAdapter(_Head)
_LINE: TypeAdapter[Any] = TypeAdapter(_Made | _Raised | _Closed)


def _checked(kind: TypeAdapter[Any], path: Path, number: int, line: bytes) -> Any:
    try:
        return kind.validate_json(line, strict=True)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ConfigError(
            f"{path}:{number}: no line of a trial's record: {where + ': ' if where else ''}{first['msg']}"
        ) from None
