"""Reads the text of a compiled TPU program: what it does, and what it moves through HBM."""

import math
import re
from typing import NamedTuple

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "s32": 4, "u32": 4, "f32": 4}
# These name memory; they do not touch it.
FREE = {"parameter", "get-tuple-element", "tuple", "bitcast", "constant", "iota"}
FREE |= {"after-all", "partition-id", "copy-done", "all-reduce-done", "all-gather-done"}


class Shape(NamedTuple):
    """One array; its layout ends in S(n) where it is not in HBM: S(1) is on the chip."""

    dtype: str
    dims: tuple[int, ...]
    layout: str

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def hbm_bytes(self) -> int:
        return 0 if "S(" in self.layout else self.size * SIZES[self.dtype]


class Instruction(NamedTuple):
    name: str
    op: str
    shapes: list[Shape]
    operands: list[str]
    rest: str  # attributes; of a parameter its number

    def called(self, attribute: str) -> list[str]:
        found = re.search(attribute + r"=\{?((?:%[\w.-]+(?:, )?)+)", self.rest)
        return found[1].split(", ") if found else []


Program = dict[str, dict[str, Instruction]]


def parse(text: str) -> Program:
    """Returns the instructions of every computation by name; "ENTRY" is the entry."""
    program: Program = {}
    inside: dict[str, Instruction] = {}
    for line in text.splitlines():
        if re.match(r"(ENTRY )?%[\w.-]+ \(.*\{$|ENTRY .*\{$", line):
            name = "ENTRY" if line.startswith("ENTRY") else line.split(" ")[0]
            inside = program.setdefault(name, {})
        elif found := re.match(r"\s+(?:ROOT )?(%[\w.-]+) = (.*)", line):
            inside[found[1]] = _instruction(found[1], found[2])
    return program


def _instruction(name: str, text: str) -> Instruction:
    end = _closing(text, 0) if text.startswith("(") else text.index(" ") - 1
    shapes = [
        Shape(dtype, tuple(int(n) for n in dims.split(",") if n), layout)
        for dtype, dims, layout in re.findall(
            r"(\w+)\[([\d,]*)\](?:\{([^}]*)\})?", text[: end + 1]
        )
    ]
    text = text[end + 2 :]
    opening = text.index("(")
    closing = _closing(text, opening)
    inputs, rest = text[opening + 1 : closing], text[closing + 1 :]
    operands = re.findall(r"%[\w.-]+", inputs)
    op = text[:opening]
    return Instruction(
        name, op, shapes, operands, inputs if op == "parameter" else rest
    )


def _closing(text: str, opening: int) -> int:
    depth = 0
    for i in range(opening, len(text)):
        depth += (text[i] == "(") - (text[i] == ")")
        if depth == 0:
            return i
    raise ValueError(f"no closing bracket in {text[:80]}")


def fused(program: Program) -> set[str]:
    """Returns the computations inside fusions: nothing between their steps is stored."""
    return {
        name
        for inside in program.values()
        for one in inside.values()
        if one.op == "fusion"
        for name in one.called("calls")
    }


def hbm_bytes(program: Program, trips: int, branch: int, name: str = "ENTRY") -> int:
    """Counts what a program reads from HBM and writes to it.

    Args:
      trips: passes of its one loop.
      branch: taken in every conditional.
    """
    total = 0
    inside = program[name]
    for one in inside.values():
        if one.op in FREE:
            continue
        if one.op == "copy-start":  # its result names source and target
            total += sum(shape.hbm_bytes for shape in one.shapes[:2])
        elif one.op == "while":
            total += trips * hbm_bytes(program, trips, branch, one.called("body")[0])
        elif one.op == "conditional":
            taken = one.called("branch_computations")[branch]
            total += hbm_bytes(program, trips, branch, taken)
        elif one.op == "fusion":
            body = program[one.called("calls")[0]]
            for i, operand in enumerate(one.operands):
                if inside[operand].shapes[0].hbm_bytes:
                    total += _read(program, body, i)
            total += sum(_written(body, shape) for shape in one.shapes)
        else:
            operands = [shape for x in one.operands for shape in inside[x].shapes]
            total += sum(shape.hbm_bytes for shape in operands + one.shapes)
    return total


def _read(program: Program, body: dict[str, Instruction], i: int) -> int:
    """Counts what a fused computation reads of its parameter i: of slices, the slice."""
    parameters = [one for one in body.values() if one.op == "parameter"]
    (own,) = (one for one in parameters if one.rest == str(i))
    return _used(program, body, own)


def _used(program: Program, body: dict[str, Instruction], value: Instruction) -> int:
    if not any(value.name in one.operands for one in body.values()):  # given back whole
        return value.shapes[0].size * SIZES[value.shapes[0].dtype]
    total = 0
    for one in body.values():
        if value.name not in one.operands:
            continue
        width = SIZES[value.shapes[0].dtype]
        if one.op in ("dynamic-slice", "slice", "gather"):
            total += one.shapes[0].size * width
        elif one.op == "dynamic-update-slice" and one.operands[0] == value.name:
            pass  # in place
        elif one.op == "bitcast" or "output_to_operand_aliasing" in one.rest:
            total += _used(program, body, one)  # another view of it
        elif one.op == "fusion":
            inner = program[one.called("calls")[0]]
            total += _read(program, inner, one.operands.index(value.name))
        else:
            total += value.shapes[0].size * width
    return min(total, value.shapes[0].size * SIZES[value.shapes[0].dtype])


def _written(body: dict[str, Instruction], shape: Shape) -> int:
    """Counts what a fusion writes to one of its results: of updates, the update."""
    for one in body.values():
        if one.op == "dynamic-update-slice" and one.shapes[0].size == shape.size:
            return min(shape.hbm_bytes, body[one.operands[1]].shapes[0].size * 4)
    return shape.hbm_bytes
