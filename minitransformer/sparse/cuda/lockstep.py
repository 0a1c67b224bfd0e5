"""A kernel rewritten, so that all threads of a block run it together, one statement at a time.

A variable becomes a plain number where all threads agree, and an array with one entry a thread
where they may not: a block then costs about as much as one thread. Where threads part, a mask says
who is there. With `t` for the `Threads` of a block:

    x = e                    x = t.put(x, e)
    a[i]                     t.load(a, i, line)
    a[i] = e                 t.store(a, i, e, line)
    a[i] += e                t.update(a, i, lambda old: old + e, line)
    if c: A                  before, c = t.active, ...
    else: B                  if t.enter(c, line): A
                             if t.enter_else(before, c): B
                             t.join(before)
    for i in range(n): A     for i in t.steps(n): A
    while c: A               for _ in t.steps():
                                 if t.goes_on(c, line): A
    break, continue          t.leave("break"), t.leave("continue")
    return e                 t.give(e)
    a and b, a or b          t.choose(a, lambda: b, lambda: False), ...
    a if c else b            t.choose(c, lambda: a, lambda: b)
    cuda.f(x)                t.call((line, number, name), cuda.f, x)

After a statement in which threads may leave, the rest of its block stands under `if not t.idle`.
Lines keep their numbers, so a traceback shows the kernel as it was written.
"""

import ast
import inspect
import math
import textwrap
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

Lanes = np.ndarray  # one entry a thread
UNSET = type("Unset", (), {"__repr__": lambda self: "a variable before its assignment"})()
MOST_TURNS = 1 << 20  # of one loop: more is taken for a loop without end


class Operation:
    """Something that a kernel calls and that wants to know from where, like what is in `cuda`."""


class EndlessLoop(Exception):
    """A loop of a kernel made `MOST_TURNS` turns."""


# ---- who is there --------------------------------------------------------------------------------


class Threads:
    """The threads of a block and who of them is active. `None` stands for all of them, where it is
    about who is there, and for none, where it is about who left."""

    def __init__(self, count: int):
        self.count = count
        self.active: Lanes | None = None
        self.gone: Lanes | None = None  # from this turn of the loop, or from the function
        self.broken: Lanes | None = None  # from the loop
        self.returned: Lanes | None = None  # from the function
        self.result: Any = UNSET
        self.place: tuple = (0, 0, "")

    @property
    def idle(self) -> bool:
        return self.active is not None and not self.active.any()

    def divided(self, line, yes, no):
        """Told of every branch: who goes where."""

    def put(self, old, new):
        if self.active is None or old is UNSET or not isinstance(new, Lanes | int | float):
            return new
        return np.where(self.active, new, old)

    def enter(self, c, line):
        if not isinstance(c, Lanes):
            return bool(c)
        c = c.astype(np.bool_, copy=False)
        yes = both(self.active, c)
        self.divided(line, yes, minus(self.active, c))
        self.active = None if yes.all() else yes
        return not self.idle

    def enter_else(self, before, c):
        if not isinstance(c, Lanes):
            return not c
        self.active = minus(before, c.astype(np.bool_, copy=False))
        return not self.idle

    def join(self, before):
        self.active = minus(before, self.gone)

    def steps(self, *bounds):
        outer, gone, broken = self.active, self.gone, self.broken
        self.broken = None
        for i, going in _turns(bounds, self.count):
            self.gone = either(self.returned, self.broken)
            self.active = minus(both(outer, going), self.gone)
            if self.idle:
                break
            yield i
        self.broken, self.gone = broken, either(gone, self.returned)
        self.active = minus(outer, self.gone)

    def goes_on(self, c, line):
        inside = self.active
        some = self.enter(c, line)
        stay = self.active if some else np.zeros(self.count, np.bool_)
        self.active = minus(inside, stay) if stay is not None else np.zeros(self.count, np.bool_)
        self.leave("break")
        self.active = stay
        return some

    def leave(self, what):
        here = np.ones(self.count, np.bool_) if self.active is None else self.active
        self.gone = either(self.gone, here)
        if what == "break":
            self.broken = either(self.broken, here)
        if what == "return":
            self.returned = either(self.returned, here)
        self.active = np.zeros(self.count, np.bool_)

    def give(self, value):
        self.result = self.put(self.result, value)
        self.leave("return")

    def choose(self, c, yes, no):
        if not isinstance(c, Lanes):
            return yes() if c else no()
        before, c = self.active, c.astype(np.bool_, copy=False)
        self.active = both(before, c)
        a = UNSET if self.idle else yes()
        self.active = minus(before, c)
        b = a if self.idle else no()
        self.active = before
        return b if a is UNSET else np.where(c, a, b)

    def negate(self, a):
        return ~a.astype(np.bool_, copy=False) if isinstance(a, Lanes) else not a

    def call(self, place, function, *arguments, **options):
        self.place = place
        return function(*arguments, **options)

    def within(self, function: Callable, arguments: tuple) -> Any:
        """Call a function that threads leave by `return`, and be as many as before."""
        kept = self.active, self.gone, self.broken, self.returned, self.result
        self.gone = self.broken = self.returned = None
        self.result = UNSET
        function(self, *arguments)
        result = None if self.result is UNSET else self.result
        self.active, self.gone, self.broken, self.returned, self.result = kept
        return result


def both(a: Lanes | None, b: Any) -> Any:
    return b if a is None else a if b is None else a & b


def either(a: Lanes | None, b: Any) -> Any:
    return b if a is None else a if b is None else a | b


def minus(a: Lanes | None, b: Any) -> Any:
    return a if b is None else ~b if a is None else a & ~b


def _turns(bounds: tuple, count: int) -> Iterator[tuple[Any, Lanes | None]]:
    """The turns of `range(*bounds)`: the value, and which threads still go (None: all)."""
    if bounds and not any(isinstance(b, Lanes) for b in bounds):
        for turn in range(*bounds):
            yield turn, None
        return
    start, stop, step = {
        0: (0, None, 1),
        1: (0, *bounds, 1),
        2: (*bounds, 1),
        3: bounds,
    }[len(bounds)]
    i: Any = np.broadcast_to(start, (count,))
    for _ in range(MOST_TURNS):
        yield i, None if stop is None else np.where(np.asarray(step) > 0, i < stop, i > stop)
        i = i + step
    raise EndlessLoop(f"a loop made {MOST_TURNS} turns")


# ---- the rewriting -------------------------------------------------------------------------------


def rewritten(function: Callable, namespace: Any) -> Callable:
    """`function` as `f(threads, *arguments)`; calls into `namespace` and of an `Operation` say
    from where.

    Raises
    ------
    SyntaxError
        If the source uses what kernels may not; it names the line.
    """
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    tree = ast.parse(textwrap.dedent("".join(lines)))
    ast.increment_lineno(tree, first - 1)
    if not isinstance(kernel := tree.body[0], ast.FunctionDef):
        raise TypeError(f"a kernel must be a function written with def, got {function}")
    known = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    placed = {n for n, v in known.items() if v is namespace or isinstance(v, Operation)}
    file = inspect.getsourcefile(function) or "<kernel>"
    module = ast.Module([_Rewriter(placed, file).kernel(kernel)], [])
    scope = {**known, **STAND_INS, **{name: MATH for name, v in known.items() if v is math}}
    exec(compile(ast.fix_missing_locations(module), file, "exec"), scope)
    return scope[kernel.name]


KEPT = (
    ast.Name, ast.Constant, ast.Attribute, ast.BinOp, ast.Tuple, ast.Pass, ast.Load, ast.Expr,
    ast.operator, ast.unaryop,
)  # fmt: skip


LEAVES = (ast.Return, ast.Break, ast.Continue)


class _Rewriter(ast.NodeTransformer):
    def __init__(self, placed: set[str], file: str):
        self.placed, self.file = placed, file
        self.names = self.places = 0  # used so far
        self.target = ""  # of the assignment at hand

    def kernel(self, node: ast.FunctionDef) -> ast.FunctionDef:
        given = [a.arg for a in node.args.args]
        stored = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)
                  and isinstance(n.ctx, ast.Store)}  # fmt: skip
        unset = [_statement(f"{name} = UNSET") for name in sorted(stored - set(given))]
        body = [ast.copy_location(s, node) for s in unset] + self.block(node.body)
        arguments = ast.arguments([], [ast.arg(n) for n in ("_t", *given)], kwonlyargs=[],
                                  kw_defaults=[], defaults=[])  # fmt: skip
        return ast.copy_location(ast.FunctionDef(node.name, arguments, body, []), node)

    def block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        """After a statement in which threads may leave, the rest is for those who are there."""
        out: list[ast.stmt] = []
        for n, statement in enumerate(statements):
            visited = self.visit(statement)
            new = visited if isinstance(visited, list) else [visited]
            rest: list[ast.stmt] = []
            if _may_leave(statement):
                rest = self.block(statements[n + 1 :])
                new += [ast.If(_expression("not _t.idle"), rest, [])] if rest else []
            for line in new:
                if not hasattr(line, "lineno"):
                    ast.copy_location(line, statement)
            out += new
            if rest or isinstance(statement, LEAVES):
                break
        return out

    def refuse(self, node: Any, why: str) -> SyntaxError:
        return SyntaxError(f"{self.file}:{getattr(node, 'lineno', '?')}: {why}")

    def generic_visit(self, node: ast.AST) -> ast.AST:
        if not isinstance(node, KEPT):
            raise self.refuse(node, f"a kernel may not have {type(node).__name__} here")
        return super().generic_visit(node)

    # ---- statements

    def visit_Assign(self, node: ast.Assign) -> Any:
        if len(node.targets) != 1:
            raise self.refuse(node, "one target for each assignment")
        self.target = getattr(node.targets[0], "id", "")
        return self.assign(node.targets[0], self.visit(node.value))

    def assign(self, target: ast.expr, value: ast.expr) -> list[ast.stmt]:
        if isinstance(target, ast.Name):
            return [ast.Assign([target], _t("put", _name(target.id), value))]
        if isinstance(target, ast.Subscript):
            array, index = self.visit(target.value), self.visit(target.slice)
            return [ast.Expr(_t("store", array, index, value, _line(target)))]
        if isinstance(target, ast.Tuple):
            whole = self.temporary()
            out: list[ast.stmt] = [ast.Assign([_name(whole, ast.Store())], value)]
            for n, part in enumerate(target.elts):
                out += self.assign(part, ast.Subscript(_name(whole), ast.Constant(n), ast.Load()))
            return out
        raise self.refuse(target, "assign to a name, an entry of an array, or a tuple of these")

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        value, target = self.visit(node.value), node.target
        if isinstance(target, ast.Subscript):
            array, index = self.visit(target.value), self.visit(target.slice)
            change = _thunk(ast.BinOp(_name("_old"), node.op, value), "_old")
            return ast.Expr(_t("update", array, index, change, _line(target)))
        if not isinstance(target, ast.Name):
            raise self.refuse(target, "a kernel changes names and entries of arrays")
        return self.assign(target, ast.BinOp(_name(target.id), node.op, value))

    def visit_If(self, node: ast.If) -> Any:
        before, c = self.temporary(), self.temporary()
        out = [
            _statement(f"{before} = _t.active"),
            ast.Assign([_name(c, ast.Store())], self.visit(node.test)),
            ast.If(_t("enter", _name(c), _line(node)), self.block(node.body), []),
        ]
        if node.orelse:
            there = _t("enter_else", _name(before), _name(c))
            out.append(ast.If(there, self.block(node.orelse), []))
        return [*out, _statement(f"_t.join({before})")]

    def visit_For(self, node: ast.For) -> Any:
        over = node.iter
        if not isinstance(over, ast.Call) or getattr(over.func, "id", "") != "range" or node.orelse:
            raise self.refuse(node, "loops run over range(...), without else")
        turn = self.temporary()
        steps = _t("steps", *map(self.visit, over.args))
        body = self.assign(node.target, _name(turn)) + self.block(node.body)
        return ast.For(_name(turn, ast.Store()), steps, body, [])

    def visit_While(self, node: ast.While) -> Any:
        if node.orelse:
            raise self.refuse(node, "loops have no else")
        on, turn = _t("goes_on", self.visit(node.test), _line(node)), self.temporary()
        body: list[ast.stmt] = [ast.If(on, self.block(node.body), [])]
        return ast.For(_name(turn, ast.Store()), _t("steps"), body, [])

    def visit_Break(self, node: ast.Break) -> Any:
        return _statement("_t.leave('break')")

    def visit_Continue(self, node: ast.Continue) -> Any:
        return _statement("_t.leave('continue')")

    def visit_Return(self, node: ast.Return) -> Any:
        return ast.Expr(_t("give", self.visit(node.value) if node.value else ast.Constant(None)))

    # ---- expressions

    def visit_Subscript(self, node: ast.Subscript) -> Any:
        return _t("load", self.visit(node.value), self.visit(node.slice), _line(node))

    def visit_BoolOp(self, node: ast.BoolOp) -> Any:
        first, *rest = map(self.visit, node.values)
        for value in map(_thunk, rest):
            ends = _thunk(ast.Constant(isinstance(node.op, ast.Or)))
            first = _t("choose", first, *((value, ends) if not ends.body.value else (ends, value)))
        return first

    def visit_UnaryOp(self, node: ast.UnaryOp) -> Any:
        value = self.visit(node.operand)
        return _t("negate", value) if isinstance(node.op, ast.Not) else ast.UnaryOp(node.op, value)

    def visit_Compare(self, node: ast.Compare) -> Any:
        sides = [self.visit(x) for x in (node.left, *node.comparators)]
        pairs = zip(sides, node.ops, sides[1:], strict=False)
        comparisons: list[ast.expr] = [ast.Compare(a, [op], [b]) for a, op, b in pairs]
        first, *rest = comparisons
        for comparison in rest:
            first = _t("choose", first, _thunk(comparison), _thunk(ast.Constant(False)))
        return first

    def visit_IfExp(self, node: ast.IfExp) -> Any:
        test, *sides = map(self.visit, (node.test, node.body, node.orelse))
        return _t("choose", test, *map(_thunk, sides))

    def visit_Call(self, node: ast.Call) -> Any:
        root: Any = node.func
        while isinstance(root, ast.Attribute):
            root = root.value
        arguments = [self.visit(a) for a in node.args]
        keywords = [ast.keyword(k.arg, self.visit(k.value)) for k in node.keywords]
        if getattr(root, "id", None) not in self.placed:
            return ast.Call(self.visit(node.func), arguments, keywords)
        self.places += 1
        place = ast.Tuple(
            [ast.Constant(x) for x in (node.lineno, self.places, self.target)], ast.Load()
        )
        return ast.Call(_t("call").func, [place, node.func, *arguments], keywords)

    def temporary(self) -> str:
        self.names += 1
        return f"_{self.names}"


def _may_leave(node: Any) -> bool:
    """Whether a thread that enters this statement may not be there after it."""
    if not isinstance(node, ast.If | ast.For | ast.While):
        return False
    leaves = (
        (ast.Return,) if not isinstance(node, ast.If) else (ast.Return, ast.Break, ast.Continue)
    )
    return any(isinstance(s, leaves) or _may_leave(s) for s in (*node.body, *node.orelse))


def _statement(text: str) -> Any:
    """Without line numbers: it gets those of the statement that it replaces."""
    tree = ast.parse(text).body[0]
    for node in ast.walk(tree):
        for name in {"lineno", "col_offset", "end_lineno", "end_col_offset"} & set(vars(node)):
            delattr(node, name)
    return tree


def _expression(text: str) -> Any:
    return _statement(text).value


def _t(method: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(_name("_t"), method, ast.Load()), list(arguments), [])


def _name(name: str, context: ast.expr_context | None = None) -> ast.Name:
    return ast.Name(name, context or ast.Load())


def _line(node: Any) -> ast.Constant:
    return ast.Constant(node.lineno)


def _thunk(body: Any, *names: str) -> Any:
    arguments = ast.arguments([], [ast.arg(n) for n in names], None, [], [], None, [])
    return ast.Lambda(arguments, body)


# ---- names that mean something else when there is one entry a thread -----------------------------


def _lifted(plain: Callable, lanes: Callable) -> Callable:
    def function(first, *rest):
        if not any(isinstance(x, Lanes) for x in (first, *rest)):
            return plain(first, *rest)
        for other in rest or ((),):
            first = lanes(first, other) if rest else lanes(first)
        return first

    return function


class _Math:
    """The module `math`, entry by entry, in the precision of its argument."""

    inf, nan, pi, e = math.inf, math.nan, math.pi, math.e

    def __getattr__(self, name: str) -> Any:
        return getattr(np, {"fabs": "abs", "pow": "power"}.get(name, name))


MATH = _Math()
STAND_INS = {
    "UNSET": UNSET,
    "min": _lifted(min, np.minimum),
    "max": _lifted(max, np.maximum),
    "abs": abs,
    "int": _lifted(int, lambda x: np.trunc(x).astype(np.int64)),
    "float": _lifted(float, lambda x: x.astype(np.float64)),
    "bool": _lifted(bool, lambda x: x != 0),
}
