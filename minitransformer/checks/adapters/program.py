"""A program in any language as a target: arrays go there and come back in safetensors files.

The protocol is written down for its authors in docs/verify_protocol.md.
"""

import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from minitransformer.arrays import Array
from minitransformer.checks.suite import NotApplicable

VERSION = 1
CANNOT = 3  # the exit code of a program that does not offer what it is asked for


class Program:
    """A command line with {input} and {output}, run once for each call.

    Raises
    ------
    ValueError
        If a placeholder is missing, or the quotes do not match.
    """

    def __init__(self, command: str, operation: str, names: tuple[str, ...]):
        self.words = shlex.split(command)
        for place in ("{input}", "{output}"):
            if not any(place in word for word in self.words):
                raise ValueError(
                    f"--command needs {place}, for example 'prog {{input}} {{output}}'"
                )
        self.operation, self.names = operation, names

    def forward(self, *arrays: Array, **options: Any) -> tuple[Array, ...] | Array:
        """`out`, or (out, lse) if it gives both."""
        given = dict(zip(self.names, arrays, strict=True))
        found = self._ask("forward", given, options)
        if "out" not in found:
            raise AssertionError(f"the program gave no 'out', only {', '.join(found) or 'nothing'}")
        return (found["out"], found["lse"]) if "lse" in found else found["out"]

    def backward(self, dout: Array, *arrays: Array, **options: Any) -> tuple[Array, ...]:
        """The gradients dq, dk, … in the order of the arrays, and dbias where there is a bias."""
        given = {"dout": dout, **dict(zip(self.names, arrays, strict=True))}
        found = self._ask("backward", given, options)
        wanted = [f"d{name}" for name in (*self.names, "bias") if f"d{name}" in found]
        return tuple(found[name] for name in wanted)

    def _ask(
        self, direction: str, arrays: Mapping[str, Array], options: Mapping[str, Any]
    ) -> dict[str, Array]:
        tensors = {n: np.ascontiguousarray(x) for n, x in arrays.items()}
        plain: dict[str, Any] = {
            "version": VERSION, "operation": self.operation, "pass": direction,
        }  # fmt: skip
        for name, value in options.items():
            if isinstance(value, np.ndarray):
                tensors[name] = np.ascontiguousarray(value)
            elif value is not None:
                plain[name] = value
        with tempfile.TemporaryDirectory(prefix="verify-") as folder:
            places = {"{input}": f"{folder}/input", "{output}": f"{folder}/output"}
            said = {name: json.dumps(value) for name, value in plain.items()}
            save_file(tensors, places["{input}"], metadata=said)
            self._run(places)
            if not Path(places["{output}"]).is_file():
                raise AssertionError("the program wrote no output file")
            try:
                return load_file(places["{output}"])
            except SafetensorError as error:
                raise AssertionError(f"the output is no safetensors file: {error}") from None

    def _run(self, places: Mapping[str, str]) -> None:
        words = []
        for word in self.words:
            for place, path in places.items():
                word = word.replace(place, path)
            words.append(word)
        ended = subprocess.run(words, capture_output=True, check=False)
        last = ended.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        text = last[0] if last else "it says nothing on stderr"
        if ended.returncode == CANNOT:
            raise NotApplicable(f"the program cannot: {text}")
        if ended.returncode:
            raise AssertionError(f"the program ended with exit code {ended.returncode}: {text}")


def program(command: str, operation: str, names: tuple[str, ...]) -> tuple[Callable, Callable]:
    """Its forward and its backward, as functions."""
    made = Program(command, operation, names)
    return made.forward, made.backward
