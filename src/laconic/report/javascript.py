"""Translate the planner's formulas to JavaScript, so that the page computes by the same source as Python.

The translator knows the part of Python that ``laconic.plan.formulas`` uses: functions of numbers, booleans and lists
with ``return``, assignments, ``if`` and ``for`` over ``zip`` or ``enumerate``. Anything else raises
``UntranslatableError`` when the page is built.
"""

from __future__ import annotations

import ast
import inspect
from functools import lru_cache
from types import ModuleType

from laconic.plan import formulas

__all__ = ["UntranslatableError", "formulas_script", "translate"]

OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">",
    ast.GtE: ">=", ast.Eq: "===", ast.NotEq: "!==", ast.And: "&&", ast.Or: "||", ast.Not: "!", ast.USub: "-",
}  # fmt: skip
FUNCTIONS = {"max": "Math.max({})", "min": "Math.min({})", "sqrt": "Math.sqrt({})", "len": "({}).length",
             "sum": "({}).reduce((a, b) => a + b, 0)"}  # fmt: skip


class UntranslatableError(TypeError):
    """A formula uses Python that the translator does not know."""


@lru_cache(maxsize=1)
def formulas_script() -> str:
    """Return a script that defines ``formulas`` with every function of ``laconic.plan.formulas``."""
    return translate(formulas, "formulas")


def translate(module: ModuleType, name: str) -> str:
    """Return JavaScript that defines an object with every function of a module."""
    functions = [node for node in ast.parse(inspect.getsource(module)).body if isinstance(node, ast.FunctionDef)]
    names = ", ".join(function.name for function in functions)
    body = "\n".join(_function(function) for function in functions)
    head = f'"use strict";\n/* Generated from {module.__name__}. */\nconst {name} = (() => {{'
    return f"{head}\n{body}\nreturn {{ {names} }};\n}})();\n"


def _function(node: ast.FunctionDef) -> str:
    parameters = [argument.arg for argument in node.args.args]
    stored = {one.id for one in ast.walk(node) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
    local = sorted(stored - set(parameters) - {"_"})
    declared = f"let {', '.join(local)};\n" if local else ""
    return f"function {node.name}({', '.join(parameters)}) {{\n{declared}{_block(node.body)}}}"


def _block(statements: list[ast.stmt]) -> str:
    return "".join(_statement(statement) + "\n" for statement in statements)


def _statement(node: ast.stmt) -> str:
    match node:
        case ast.Expr(ast.Constant(str())):  # a docstring
            return ""
        case ast.Return(ast.expr() as value):
            return f"return {_expression(value)};"
        case ast.Assign([target], value) | ast.AnnAssign(target, value=ast.expr() as value):
            return f"{_expression(target)} = {_expression(value)};"
        case ast.If(test, body, orelse):
            otherwise = f" else {{\n{_block(orelse)}}}" if orelse else ""
            return f"if ({_expression(test)}) {{\n{_block(body)}}}{otherwise}"
        case ast.For(ast.Tuple([first, second]), ast.Call(ast.Name("enumerate"), [values]), body, []):
            head = f"for ([{_expression(first)}, {_expression(second)}] of {_expression(values)}.entries())"
            return f"{head} {{\n{_block(body)}}}"
        case ast.For(ast.Tuple([first, second]), ast.Call(ast.Name("zip"), [one, other]), body, []):
            pairs = f"{_expression(one)}.map((value, i) => [value, {_expression(other)}[i]])"
            return f"for ([{_expression(first)}, {_expression(second)}] of {pairs}) {{\n{_block(body)}}}"
        case ast.Expr(ast.Call(ast.Attribute(values, "append"), [value])):
            return f"{_expression(values)}.push({_expression(value)});"
    raise UntranslatableError(f"line {node.lineno}: cannot translate the statement {ast.unparse(node)!r}")


def _expression(node: ast.expr) -> str:
    match node:
        case ast.Name(name):
            return name
        case ast.Constant(bool() as value):
            return str(value).lower()
        case ast.Constant(int() | float() as value):
            return repr(value)
        case ast.List(items):
            return f"[{', '.join(map(_expression, items))}]"
        case ast.BinOp(left, operator, right) if type(operator) in OPERATORS:
            return f"({_expression(left)} {OPERATORS[type(operator)]} {_expression(right)})"
        case ast.Compare(left, [operator], [right]) if type(operator) in OPERATORS:
            return f"({_expression(left)} {OPERATORS[type(operator)]} {_expression(right)})"
        case ast.BoolOp(operator, values):
            return f"({f' {OPERATORS[type(operator)]} '.join(map(_expression, values))})"
        case ast.UnaryOp(operator, value) if type(operator) in OPERATORS:
            return f"({OPERATORS[type(operator)]}{_expression(value)})"
        case ast.IfExp(test, body, orelse):
            return f"({_expression(test)} ? {_expression(body)} : {_expression(orelse)})"
        case ast.Subscript(values, ast.UnaryOp(ast.USub(), ast.Constant(int() as place))):
            listed = _expression(values)
            return (
                f"{listed}.at(-{place})" if isinstance(node.ctx, ast.Load) else f"{listed}[{listed}.length - {place}]"
            )
        case ast.Subscript(values, ast.Slice(None, None, ast.UnaryOp(ast.USub(), ast.Constant(1)))):
            return f"[...{_expression(values)}].reverse()"
        case ast.Subscript(values, ast.expr() as place) if not isinstance(place, ast.Slice):
            return f"{_expression(values)}[{_expression(place)}]"
        case ast.ListComp(value, [ast.comprehension(ast.Name(name), values, [], 0)]):
            return f"{_expression(values)}.map(({name}) => {_expression(value)})"
        case ast.Call(ast.Name(name) | ast.Attribute(ast.Name("math"), name), arguments, []):
            listed = ", ".join(map(_expression, arguments))
            return FUNCTIONS[name].format(listed) if name in FUNCTIONS else f"{name}({listed})"
    raise UntranslatableError(f"line {node.lineno}: cannot translate the expression {ast.unparse(node)!r}")
