"""Mutations: small wrong changes of a Python source, each one place of its syntax tree.

Owns the list of changes. Messages, annotations, docstrings and imports stay: no test should depend on them.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable, Iterator
from typing import NamedTuple

COMPARISONS = {
    ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt, ast.Eq: ast.NotEq, ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot, ast.IsNot: ast.Is, ast.In: ast.NotIn, ast.NotIn: ast.In,
}  # fmt: skip
OPERATORS = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.FloorDiv: ast.Mult, ast.Mod: ast.Add,
    ast.BitAnd: ast.BitOr, ast.BitOr: ast.BitAnd, ast.BitXor: ast.BitOr, ast.LShift: ast.RShift, ast.RShift: ast.LShift,
}  # fmt: skip
NAMES = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
CASTS = ("bool", "int", "float", "assert_never")
"""Calls that a mutation drops: a numpy number works without them."""
DELETED = (ast.Expr, ast.Assign, ast.AugAssign, ast.Raise, ast.Continue, ast.Break, ast.Delete)
UNTOUCHED = (ast.JoinedStr, ast.Import, ast.ImportFrom, ast.arguments)


class Mutation(NamedTuple):
    """The change `kind` at index `place` of `places`."""

    place: int
    kind: str
    line: int
    before: str
    after: str


def mutations(source: str) -> list[Mutation]:
    """Return all mutations of a source, in source order."""
    found, tree = [], ast.parse(source)
    for number, node in enumerate(places(tree)):
        for kind, change in changes(node):
            after = change(copy.deepcopy(node))
            found.append(Mutation(number, kind, node.lineno, ast.unparse(node), ast.unparse(after)))
    return found


def mutated(source: str, mutation: Mutation) -> ast.Module:
    """Return the syntax tree of the source with one mutation applied."""
    tree = ast.parse(source)
    node = next(node for number, node in enumerate(places(tree)) if number == mutation.place)
    change = dict(changes(node))[mutation.kind]
    return ast.fix_missing_locations(_Replace(node, ast.copy_location(change(copy.deepcopy(node)), node)).visit(tree))


def places(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every node that may be changed, parents first."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, UNTOUCHED) or _is_annotation(tree, child) or _is_note(child):
            continue
        if hasattr(child, "lineno"):
            yield child
        yield from places(child)


def _is_annotation(parent: ast.AST, child: ast.AST) -> bool:
    return child is getattr(parent, "annotation", None) or child is getattr(parent, "returns", None)


def _is_note(node: ast.AST) -> bool:
    """A docstring, or a list of names for `__slots__`."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    return isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) in ("__slots__", "__all__")


class _Replace(ast.NodeTransformer):
    def __init__(self, old: ast.AST, new: ast.AST) -> None:
        self.old, self.new = old, new

    def visit(self, node: ast.AST) -> ast.AST:
        return self.new if node is self.old else self.generic_visit(node)


# ---- what is changed ---------------------------------------------------------------------------------------------


def changes(node: ast.AST) -> Iterator[tuple[str, Callable[[ast.AST], ast.AST]]]:
    """Yield (kind, function that changes a copy of the node)."""
    if isinstance(node, DELETED):
        yield "deleted statement", lambda node: ast.Pass()
    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARISONS:
        yield "comparison", _other_comparison
    if isinstance(node, ast.BoolOp):
        yield "and/or", _other_connective
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        yield "operator", _other_operator
    if isinstance(node, (ast.If, ast.While, ast.IfExp)):
        yield "negated condition", _negated
    if isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield "constant", _other_constant
    if isinstance(node, ast.Call) and _called(node) in NAMES:
        yield "other function", _other_function
    if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords and _called(node) not in CASTS:
        yield "removed call", lambda node: node.args[0]
    if isinstance(node, ast.Return) and node.value is not None and not isinstance(node.value, ast.Constant):
        yield "returned nothing", lambda node: ast.Return(value=ast.Constant(None))


def _called(node: ast.Call) -> str:
    return node.func.id if isinstance(node.func, ast.Name) else getattr(node.func, "attr", "")


def _other_comparison(node: ast.Compare) -> ast.AST:
    node.ops[0] = COMPARISONS[type(node.ops[0])]()
    return node


def _other_connective(node: ast.BoolOp) -> ast.AST:
    node.op = ast.And() if isinstance(node.op, ast.Or) else ast.Or()
    return node


def _other_operator(node: ast.BinOp) -> ast.AST:
    node.op = OPERATORS[type(node.op)]()
    return node


def _negated(node: ast.If) -> ast.AST:
    node.test = ast.UnaryOp(ast.Not(), node.test)
    return node


def _other_constant(node: ast.Constant) -> ast.AST:
    node.value = (not node.value) if isinstance(node.value, bool) else node.value + 1
    return node


def _other_function(node: ast.Call) -> ast.AST:
    if isinstance(node.func, ast.Name):
        node.func.id = NAMES[node.func.id]
    else:
        node.func.attr = NAMES[node.func.attr]
    return node
