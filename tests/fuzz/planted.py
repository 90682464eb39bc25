"""Targets with planted bugs that the fuzzer must find."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from random import Random

from benchmarks.fuzz.run import Case, Target


def _in_case_3(name: str, harm: Case) -> Target:
    def prepare(folder: Path) -> Case:
        # as for real targets, a case depends only on its random numbers
        third = Random(f"{name} 3").random()
        return lambda chance: harm(chance) if chance.random() == third else None

    return Target(prepare, 0)


_HARM: dict[str, Case] = {
    "error": lambda chance: {}["no such key"],
    "exit": lambda chance: exit(0),
    "crash": lambda chance: ctypes.string_at(0) and None,
    "hang": lambda chance: time.sleep(3600),
    "memory": lambda chance: print(len(b"x" * (1 << 30))),
    "too much memory": lambda chance: print(len(b"x" * (100 << 30))),
}

TARGETS = {name: _in_case_3(name, harm) for name, harm in _HARM.items()}
