"""Finds all small mistakes that can be made in a module, and makes them."""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

CHECKS = ("validate", "_contradictions", "_check_links", "__repr__", "__str__")
"""Functions that only report broken state: mistakes in them are harmless."""

TELLING = ("tell", "_note", "story")
"""Calls that only produce text for people, like the values of `Note` and of errors."""

COMPARISONS: dict[type[ast.cmpop], tuple[type[ast.cmpop], ...]] = {
    ast.Lt: (ast.LtE, ast.GtE),
    ast.LtE: (ast.Lt, ast.Gt),
    ast.Gt: (ast.GtE, ast.LtE),
    ast.GtE: (ast.Gt, ast.Lt),
    ast.Eq: (ast.NotEq,),
    ast.NotEq: (ast.Eq,),
    ast.Is: (ast.IsNot,),
    ast.IsNot: (ast.Is,),
    ast.In: (ast.NotIn,),
    ast.NotIn: (ast.In,),
}
ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.Div: ast.Mult,
    ast.Mod: ast.FloorDiv,
}
OTHER_NAMES = {"min": "max", "max": "min", "any": "all", "all": "any"}


@dataclass(frozen=True)
class Mutant:
    """One mistake.

    Attributes:
        module: name of the module, "mbaas.core.staging.window".
        function: its qualified name.
        starts, line: first line of the function, and line of the mistake.
        before, after: the code without and with the mistake.
        number: index among equal changes in the function, from 0.
        index: number of the node in the module, and of the change at that node.
    """

    module: str
    function: str
    starts: int
    line: int
    before: str
    after: str
    number: int
    index: tuple[int, int]

    @property
    def key(self) -> str:
        """Identifier that does not depend on line numbers."""
        times = f" ({self.number + 1})" if self.number else ""
        return f"{self.module} {self.function}: {self.before} -> {self.after}{times}"


Change = Callable[[Any], ast.AST]
"""Changes a copy of a node."""


def _changes(node: ast.AST) -> Iterator[Change]:
    """Yield the changes for one node; each takes a copy of the node and returns its replacement."""
    match node:
        case ast.Compare():
            for number, operator in enumerate(node.ops):
                for other in COMPARISONS[type(operator)]:
                    yield partial(_compare_by, number, other)
        case ast.BoolOp():
            yield lambda n: ast.BoolOp(ast.And() if isinstance(n.op, ast.Or) else ast.Or(), n.values)
        case ast.UnaryOp(op=ast.Not()):
            yield lambda n: n.operand
        case ast.BinOp() if type(node.op) in ARITHMETIC:
            yield lambda n: ast.BinOp(n.left, ARITHMETIC[type(n.op)](), n.right)
        case ast.Constant(value=bool()):
            yield lambda n: ast.Constant(not n.value)
        case ast.Constant(value=int() | float()):
            yield lambda n: ast.Constant(n.value + 1)
            yield lambda n: ast.Constant(n.value - 1)
        case ast.Name() if node.id in OTHER_NAMES:
            yield lambda n: ast.Name(OTHER_NAMES[n.id], n.ctx)
        case ast.If() | ast.IfExp() | ast.While() if not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield _negate_test  # comparisons are changed at their own node
        case ast.comprehension() if node.ifs:
            yield lambda n: ast.comprehension(n.target, n.iter, [], n.is_async)
        case ast.Return() if node.value is not None and not _is_nothing(node.value):
            yield lambda _: ast.Return(ast.Constant(None))
        case ast.AugAssign() if type(node.op) in ARITHMETIC:
            yield lambda n: ast.AugAssign(n.target, ARITHMETIC[type(n.op)](), n.value)
            yield lambda _: ast.Pass()
        case ast.Assign() if not all(isinstance(target, ast.Name) for target in node.targets):
            yield lambda _: ast.Pass()
        case ast.Expr(value=ast.Call() | ast.Yield()) | ast.Delete() | ast.Raise():
            yield lambda _: ast.Pass()
        case ast.Continue():
            yield lambda _: ast.Break()
        case ast.Break():
            yield lambda _: ast.Continue()


def _compare_by(number: int, operator: type[ast.cmpop], node: ast.Compare) -> ast.AST:
    node.ops[number] = operator()
    return node


def _negate_test(node: ast.AST) -> ast.AST:
    assert isinstance(node, ast.If | ast.IfExp | ast.While)
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _is_nothing(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and not node.value  # for a caller that needs a boolean, None equals False


def _is_for_people(node: ast.AST) -> bool:
    """Return whether the node only produces text for people."""
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(attr=name))) if name in TELLING:
            return True
        case ast.Expr(value=ast.Call(args=[ast.Call(func=ast.Attribute(attr="Note"))])):
            return True
        case ast.Expr(value=ast.Constant()) | ast.JoinedStr():
            return True
    return False


def _functions(tree: ast.Module) -> Iterator[tuple[str, ast.FunctionDef]]:
    """Yield functions and methods of a module with their qualified names; inner functions belong to the outer one."""
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            yield node.name, node
        elif isinstance(node, ast.ClassDef):
            for inner in node.body:
                if isinstance(inner, ast.FunctionDef):
                    yield f"{node.name}.{inner.name}", inner


def _inside(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """Yield the nodes of a function that can be wrong: without annotations, defaults and text for people."""
    waiting: list[ast.AST] = list(reversed(function.body))
    while waiting:
        node = waiting.pop()
        if _is_for_people(node):
            continue
        yield node
        if isinstance(node, ast.Raise):
            continue  # the message of an error
        parts = [child for name, child in ast.iter_fields(node) if name not in ("annotation", "returns")]
        flat = [one for part in parts for one in (part if isinstance(part, list) else [part])]
        waiting += [one for one in reversed(flat) if isinstance(one, ast.AST)]


def mutants(module: str, path: Path) -> list[Mutant]:
    """Return all mistakes that can be made in a module."""
    tree = ast.parse(path.read_text())
    found: list[Mutant] = []
    seen: dict[tuple[str, str, str], int] = {}
    index = 0
    for name, function in _functions(tree):
        if function.name in CHECKS:
            continue
        starts = min([function.lineno, *(decorator.lineno for decorator in function.decorator_list)])
        for node in _inside(function):
            index += 1
            for number, change in enumerate(_changes(node)):
                before, after = _shown(node), _shown(change(copy.deepcopy(node)))
                times = seen.get((name, before, after), 0)
                seen[name, before, after] = times + 1
                line = getattr(node, "lineno", function.lineno)
                found.append(Mutant(module, name, starts, line, before, after, times, (index, number)))
    return found


def _shown(node: ast.AST) -> str:
    """Return the first line of the code; for a branch, its condition."""
    if isinstance(node, ast.If | ast.While):
        return f"if {ast.unparse(node.test)}"
    if isinstance(node, ast.comprehension):
        return ast.unparse(node).strip()
    return ast.unparse(node).splitlines()[0]


def mutated_code(mutant: Mutant, path: Path) -> types.CodeType:
    """Return the code of the function with the mistake."""
    tree = ast.parse(path.read_text())
    index = 0
    for name, function in _functions(tree):
        if function.name in CHECKS:
            continue
        for node in list(_inside(function)):
            index += 1
            if index == mutant.index[0]:
                change = list(_changes(node))[mutant.index[1]]
                _Replace(node, change(copy.deepcopy(node))).visit(function)
                ast.fix_missing_locations(tree)
                return _code_of(compile(tree, str(path), "exec"), name)
    raise ValueError(f"{mutant.key} is nowhere in {path}")


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self._old, self._new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return ast.copy_location(self._new, node) if node is self._old else super().generic_visit(node)


def _code_of(module: types.CodeType, name: str) -> types.CodeType:
    code = module
    for part in name.split("."):
        inner = [const for const in code.co_consts if isinstance(const, types.CodeType) and const.co_name == part]
        code = inner[-1]
    return code
