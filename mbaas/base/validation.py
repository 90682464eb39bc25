"""Validate values with pydantic, and report errors as sentences.

`options` turns a class into a frozen dataclass whose fields are validated against their annotations: the single
definition of type, default, bounds and description. Python callers get a `ConfigError` for an invalid value; files
(`mbaas.base.files`) get the same sentence with a line number.
"""

from __future__ import annotations

import ast
import difflib
import functools
import inspect
import itertools
import textwrap
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import TYPE_CHECKING, Any, Generic, ParamSpec, TypeVar, get_type_hints

from typing_extensions import dataclass_transform

from mbaas.base import units
from mbaas.errors import ConfigError

# Every actor and trial imports the options without validating any. Importing pydantic takes as long as the rest of an
# actor, so the first validation does it.
if TYPE_CHECKING:
    from pydantic import ConfigDict, GetCoreSchemaHandler, GetJsonSchemaHandler, TypeAdapter, ValidationError
    from pydantic_core import CoreSchema, ErrorDetails

Class = TypeVar("Class", bound=type)
Parameters = ParamSpec("Parameters")
Made = TypeVar("Made")
Returned = TypeVar("Returned")
Value = TypeVar("Value")
Accepted = TypeVar("Accepted")

_PARSING = threading.RLock()
"""Held while source code is parsed, by pydantic too: in CPython 3.11, ``ast.parse`` may fail in two threads at once."""

_adapters: dict[type, TypeAdapter[Any]] = {}

STRICT: ConfigDict = {
    "strict": True,
    "extra": "forbid",
    "arbitrary_types_allowed": True,
    "use_attribute_docstrings": True,
}
"""Neither True nor "4" is a number, and an unknown name is an error instead of an ignored option."""

_WANTED = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "tuple_type": "a list",
    "dict_type": "'key: value' lines",
    "dataclass_type": "'key: value' lines",
    "dataclass_exact_type": "'key: value' lines",
    "model_type": "'key: value' lines",
    "model_attributes_type": "'key: value' lines",
}
"""pydantic's name of an error -> the expected value."""

_BOUNDS = {
    "greater_than": ("above", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("below", "lt"),
    "less_than_equal": ("at most", "le"),
}

MOST_BITS = 1000
"""Largest size of an integer in bits: "0xff..." may have thousands, which Python cannot format in decimal."""

UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
LACKING = ("missing", "missing_argument", "missing_keyword_only_argument")


if TYPE_CHECKING:

    class Accepts(Generic[Value, Accepted]):
        """Type of a field that is assigned an ``Accepted`` and read as a ``Value``; for type checkers only."""

        def __get__(self, instance: object, owner: object) -> Value: ...
        def __set__(self, instance: object, value: Accepted) -> None: ...

    def option(*, default: object) -> Any:
        """Define a field of a type that `Accepts` its default in another form."""

else:
    option = field


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field, option))
def options(*, within: str | None = None) -> Callable[[Class], Class]:
    """Turn a class into a frozen, keyword-only dataclass that validates itself and raises `ConfigError`.

    Fields with ``kw_only=False`` may also be given by position.

    Args:
        within: the name of this group in a larger one: errors call its fields "{within}.{field}".
    """

    def made(kind: Class) -> Class:
        checked: Any = dataclass(frozen=True, kw_only=True)(kind)
        checked.__pydantic_config__ = STRICT
        unchecked = checked.__init__
        has_defaults = all(
            each.default is not MISSING or each.default_factory is not MISSING for each in fields(checked)
        )
        positional = [each.name for each in fields(checked) if not each.kw_only]

        @functools.wraps(unchecked)
        def __init__(self: Any, *args: Any, **given: Any) -> None:  # noqa: N807 (a dataclass's, with checks)
            if not args and not given and has_defaults:
                unchecked(self)  # defaults need no validation, and are created on import
                return
            if len(args) > len(positional):
                raise TypeError(f"{len(args)} positional arguments were given, at most {len(positional)} are allowed")
            by_position = dict(zip(positional, args, strict=False))
            if twice := sorted(by_position.keys() & given):
                raise TypeError(f"{' and '.join(twice)} was given by position and by name")
            from pydantic import ValidationError
            from pydantic_core import ArgsKwargs

            try:
                arguments = ArgsKwargs((), {**by_position, **given})
                adapter_of(checked).validator.validate_python(arguments, self_instance=self)
            except ValidationError as error:
                # pydantic has no hook to replace its multi-line errors
                known = [each.name for each in fields(checked)]
                raise ConfigError(sentence(error, within=within, known=known)) from None

        checked.__init__ = __init__
        return checked

    return made


def takes(
    request: Callable[Parameters, Made], *, elsewhere: Mapping[str, tuple[str, ...]] | None = None
) -> Callable[[Callable[[Made], Returned]], Callable[Parameters, Returned]]:
    """Turn a function of one ``request``, a dataclass, into a function of its fields, with defaults, types,
    descriptions.

    Type checkers and editors see the fields as parameters. ``help`` also shows their docstrings, as a section "Args"
    before the section "Raises" of the function's docstring. ``elsewhere`` are options of another class, and their names
    there.
    """

    def decorated(function: Callable[[Made], Returned]) -> Callable[Parameters, Returned]:
        @functools.wraps(function)
        def call(*args: Parameters.args, **named: Parameters.kwargs) -> Returned:
            for name in named:
                if name not in signature.parameters:
                    hint = instead(name, signature.parameters, elsewhere)
                    raise ConfigError(f"unknown option {name!r} of {function.__name__}; {hint}")
            return function(request(*args, **named))

        kind: Any = request
        hints = get_type_hints(kind)
        parameters = [each.replace(annotation=hints[name]) for name, each in inspect.signature(kind).parameters.items()]
        signature = inspect.Signature(parameters, return_annotation=get_type_hints(function)["return"])
        call.__signature__ = signature  # type: ignore[attr-defined]
        descriptions = descriptions_of(kind)
        lines = [
            textwrap.fill(
                f"{name}: {descriptions.get(name, '')}", 106, initial_indent=" " * 4, subsequent_indent=" " * 8
            )
            for name in signature.parameters
        ]
        # Without its indentation, as since Python 3.13.
        text = inspect.cleandoc(function.__doc__ or "")
        call.__doc__ = text.replace("\nRaises:\n", "\n".join(["\nArgs:", *lines, "", "Raises:\n"]))
        return call

    return decorated


def knows_names(function: Callable[Parameters, Returned]) -> Callable[Parameters, Returned]:
    """Let a function raise ConfigError with the nearest name for an unknown one, as Python does only since 3.13."""
    known = inspect.signature(function).parameters

    @functools.wraps(function)
    def call(*args: Parameters.args, **named: Parameters.kwargs) -> Returned:
        for name in named:
            if name not in known:
                raise ConfigError(f"unknown parameter {name!r} of {function.__name__}; {instead(name, known)}")
        return function(*args, **named)

    return call


@functools.cache
def descriptions_of(kind: type) -> dict[str, str]:
    """Return the docstrings of a dataclass's fields, inherited ones included.

    A field without one has the first sentence of its type's docstring. Empty if the source code is missing.
    """
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        if not is_dataclass(each):
            continue
        for name, hint in get_type_hints(each).items():
            if is_dataclass(hint) and name in each.__annotations__:
                found[name] = (inspect.getdoc(hint) or "").partition("\n\n")[0]
        try:
            with _PARSING:
                (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        except OSError:
            continue
        assert isinstance(definition, ast.ClassDef)
        for line, after in itertools.pairwise(definition.body):
            if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and isinstance(after, ast.Expr):
                found[line.target.id] = " ".join(ast.literal_eval(after.value).split())
    return found


def adapter_of(kind: type[Value]) -> TypeAdapter[Value]:
    """Return pydantic's reader of a class, made once. Making one takes a thousand times as long as reading a value."""
    with _PARSING:
        if kind not in _adapters:
            from pydantic import TypeAdapter

            _adapters[kind] = TypeAdapter(kind)
        return _adapters[kind]


@dataclass(frozen=True)
class Checked:
    """Annotation with a function that pydantic applies to a field's value, ``first``, or as the ``only`` check.

    It returns the result or raises `ConfigError`. ``says`` is an addition to the value's JSON schema.
    """

    check: Callable[[Any], Any]
    first: bool = False
    only: bool = False
    says: Mapping[str, Any] = field(default_factory=dict, hash=False)  # annotations of unions are hashed

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        if self.only:
            return core_schema.no_info_plain_validator_function(self.check)
        if self.first:
            return core_schema.no_info_before_validator_function(self.check, handler(source))
        return core_schema.no_info_after_validator_function(self.check, handler(source))

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self.says}


@dataclass(frozen=True)
class OneOrMore:
    """Annotation of a tuple that may also be given as a list, as a single item, or as None for none."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        from pydantic_core import core_schema

        return core_schema.no_info_before_validator_function(self._as_tuple, handler(source))

    @staticmethod
    def _as_tuple(given: Any) -> Any:
        return tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        several = handler(schema)
        return {"anyOf": [several["items"], several, {"type": "null"}]}


def sentence(error: ValidationError, *, within: str | None, known: Iterable[str]) -> str:
    """Return the first error in the arguments of a call as a sentence; unknown names come first."""
    details = worst(error.errors(include_url=False))
    *outer, name = [str(part) for part in (*([within] if within else []), *details["loc"])] or [""]
    path = ".".join((*outer, name))
    if details["type"] in UNKNOWN:
        return f"unknown option {path!r}; {instead(name, known)}"
    if details["type"] in LACKING:
        return f"{path} is missing"
    if (cause := own(details)) is not None:
        return str(cause)
    group = details.get("ctx", {}).get("class_name")  # files have 'key: value' lines instead
    must = f"must be {group}(...)" if group is not None else wrong(details, name)
    return f"{path} {must}, got {details['input']!r}"


def worst(found: Sequence[ErrorDetails]) -> ErrorDetails:
    """Return the error to report: an unknown name first, because it may be the reason why another is missing."""
    return next((details for details in found if details["type"] in UNKNOWN), found[0])


def own(details: ErrorDetails) -> ConfigError | None:
    """Return the `ConfigError` that one of our checks raised; None for pydantic's own errors."""
    error = details.get("ctx", {}).get("error")
    return error if isinstance(error, ConfigError) else None


def wrong(details: ErrorDetails, name: str) -> str:
    """Return the end of a sentence that starts with the option's name: "must be above 0 seconds"."""
    kind, context = details["type"], details.get("ctx", {})
    if kind in _WANTED:
        return f"must be {_WANTED[kind]}"
    if kind in _BOUNDS:
        how, key = _BOUNDS[kind]
        in_seconds = name.endswith("_s") and not name.endswith("_per_s")
        return f"must be {how} {units.exact(context[key])}{' seconds' if in_seconds else ''}"
    if kind == "literal_error":
        return f"must be one of {context['expected'].replace(' or ', ', ')}"
    if kind in ("too_short", "too_long"):
        least, most = context.get("min_length"), context.get("max_length")
        return f"must hold at least {least} values" if kind == "too_short" else f"must hold at most {most} values"
    return details["msg"]


def instead(name: str, known: Iterable[str], elsewhere: Mapping[str, tuple[str, ...]] | None = None) -> str:
    """Return a hint for an unknown name: its place in ``elsewhere``, the nearest known name, or all known names."""
    if elsewhere is not None and name in elsewhere:
        return f"it is {' or '.join(map(repr, elsewhere[name]))}"
    names = list(known)
    near = difflib.get_close_matches(name, names, n=1)
    return f"did you mean {near[0]!r}?" if near else f"known are {', '.join(sorted(names))}"
