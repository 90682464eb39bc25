"""YAML 1.1 with two corrections: 1e-3 is a number, and a date is a string."""

from __future__ import annotations

import re

import yaml

_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9_]*)?)[eE][-+]?[0-9]+$")
"""Numbers such as 1e-3 and 2.5e3, which YAML 1.1 reads as strings."""

_OTHER_BASE = re.compile(r"[-+]?(0[0-9_]+|[0-9][0-9_]*(:[0-5]?[0-9])+(\.[0-9_]*)?)")
"""Codes and times of day, which YAML 1.1 reads as numbers of base 8 or 60: 010 as 8, 12:30 as 750."""


class Loader(yaml.SafeLoader):
    """`yaml.SafeLoader` with exponents as numbers and dates as strings."""

    yaml_implicit_resolvers = {  # noqa: RUF012 (PyYAML's name)
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


Loader.add_implicit_resolver("tag:yaml.org,2002:float", _EXPONENT, list("-+.0123456789"))


def is_of_other_base(written: str) -> bool:
    """Return whether YAML reads an unquoted value as an octal or base-60 number."""
    return _OTHER_BASE.fullmatch(written) is not None
