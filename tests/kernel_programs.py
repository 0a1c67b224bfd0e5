"""Random kernels: nested branches and loops with break, continue and return, as text."""

import random

SIZE = 7  # threads, and entries of x


class Programs:
    """The kernel of a seed; `source` defines `make(cuda)`, which returns `kernel(x, out)`."""

    def __init__(self, seed: int):
        self.random, self.names = random.Random(seed), ["a", "b", "c"]

    def source(self) -> str:
        helper = self.block(3, 2, loop=False, returns="b")
        body = self.block(2, 0, loop=False, returns="") + self.block(2, 0, loop=False, returns="")
        return "\n".join([
            "def make(cuda):",
            "    @cuda.jit(device=True)",
            "    def helper(a, i, x):",
            "        b, c = 1, a",
            "        if i > 1:",
            *helper,
            "        return a + b",
            "",
            "    def kernel(x, out):",
            "        i = cuda.grid(1)",
            "        a, b, c = i, x[i], 3",
            *body,
            "        out[i, 0] = a",
            "        out[i, 1] += b",
            "        out[i, 2] -= c",
            "    return kernel",
            "",
        ])  # fmt: skip

    def value(self, depth: int = 0) -> str:
        kind = "name" if depth > 2 else self.one("name", "name", "sum", "sum", "choice", "least")
        if kind == "name":
            return self.one(*self.names, "i", "x[i]", str(self.random.randrange(-3, 6)))
        a, b = self.value(depth + 1), self.value(depth + 1)
        if kind == "sum":
            return f"({a} {self.one('+', '-', '*')} {b}) % 11"
        if kind == "choice":
            return f"({a} if {self.test(depth + 1)} else {b})"
        return f"{self.one('min', 'max')}({a}, {b})"

    def test(self, depth: int = 0) -> str:
        kind = "one" if depth > 2 else self.one("one", "one", "two", "not", "chain", "guard")
        if kind == "two":
            return f"({self.test(depth + 1)} {self.one('and', 'or')} {self.test(depth + 1)})"
        if kind == "not":
            return f"not ({self.test(3)})"
        if kind == "chain":
            return f"0 <= {self.one(*self.names)} < {self.value(2)}"
        if kind == "guard":  # x[a] may be read only where the first two hold
            return f"(a >= 0 and a < {SIZE} and x[a] > 1)"
        return f"{self.value(2)} {self.one('<', '<=', '==', '!=', '>')} {self.value(2)}"

    def block(self, indent: int, depth: int, loop: bool, returns: str) -> list[str]:
        pad, out = "    " * indent, []
        inner = {"indent": indent + 1, "depth": depth + 1, "returns": returns}
        for _ in range(self.random.randrange(1, 4)):
            kinds = ["set", "set", "if", "if", "for", "while", "leave"]
            if not returns:
                kinds += ["store", "call"]
            kind = "set" if depth > 3 else self.one(*kinds)
            if kind == "set":
                name = self.one(*self.names)
                out.append(f"{pad}{name} {self.one('=', '+=', '-=')} {self.value()} % 11")
            elif kind == "store":
                out.append(f"{pad}out[i, {self.random.randrange(3)}] += {self.value()}")
            elif kind == "call":
                out.append(f"{pad}c = helper(a % 5, i, x)")
            elif kind == "if":
                out += [f"{pad}if {self.test()}:", *self.block(loop=loop, **inner)]
                if self.random.random() < 0.6:
                    head = self.one("else:", f"elif {self.test()}:")
                    out += [f"{pad}{head}", *self.block(loop=loop, **inner)]
            elif kind == "for":
                bounds = self.one("3", "i % 4", "a % 5", "1, 6, 2", "i, i + 3", "5, a % 3, -1")
                out += [f"{pad}for n{depth} in range({bounds}):", f"{pad}    a += n{depth}"]
                out += self.block(loop=True, **inner)
            elif kind == "while":
                out += [f"{pad}w{depth} = 0", f"{pad}while w{depth} < 5 and {self.test()}:"]
                out += [f"{pad}    w{depth} += 1", *self.block(loop=True, **inner)]
            else:
                leave = f"return {returns}"
                out.append(pad + (self.one("break", "continue", leave) if loop else leave))
                break
        return out

    def one(self, *of: str) -> str:
        return self.random.choice(of)
