"""What a compiled program costs: its matrix products and its memory, as XLA planned them.

XLA's own `cost_analysis` counts a loop's body once, however often it runs, so a scanned model would seem to
cost as little as one of its blocks. Here the products are read from the optimized program, each loop's times
its trip count.
"""

import dataclasses
import math
import os
import re
from typing import Any, NamedTuple

import jax

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{\s*$")
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_OPERAND = re.compile(r"(?:(\w+\[[\d,]*\]\S*) )?%?([\w.\-]+)")
_SHAPE = re.compile(r"\w+\[([\d,]*)\]")
_CONTRACTED = re.compile(r"lhs_contracting_dims=\{([\d,]*)\}")
_BODY = re.compile(r"body=%?([\w.\-]+)")
_TRIP_COUNT = re.compile(r"known_trip_count\D*(\d+)")
_CALLED = re.compile(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_LIBRARY_PRODUCT = re.compile(r'custom_call_target="[^"]*(?:gemm|matmul|dot)', re.IGNORECASE)


class _Instruction(NamedTuple):
    name: str
    type: str
    operation: str
    rest: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Memory:
    """Bytes that a compiled program needs, as XLA planned them.

    Attributes:
        arguments: its inputs.
        outputs: its results, those written over inputs included.
        temporaries: everything else at the peak.
        aliased: outputs that are written over donated inputs.
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int

    @property
    def total(self) -> int:
        """Bytes while it runs: arguments, outputs and temporaries, each byte once."""
        return self.arguments + self.outputs + self.temporaries - self.aliased


def memory(compiled: Any) -> Memory:
    """The memory of a `jax.stages.Compiled`."""
    used = compiled.memory_analysis()
    return Memory(
        arguments=used.argument_size_in_bytes,
        outputs=used.output_size_in_bytes,
        temporaries=used.temp_size_in_bytes,
        aliased=used.alias_size_in_bytes,
    )


def matmul_flops(compiled: Any) -> int:
    """Floating-point operations of all matrix products of a `jax.stages.Compiled`.

    A loop without a known trip count, such as the ghost engine's rounds, is counted once, and of a
    conditional's branches the dearest.

    Raises:
        ValueError: where a product is a convolution or a library's, which it cannot count.
    """
    return _Program(compiled.as_text()).flops()


def countable_matmul_flops(compiled: Any) -> int | None:
    """`matmul_flops`; None where a product cannot be counted, as on a GPU."""
    try:
        return matmul_flops(compiled)
    except ValueError:
        return None


def device_memory() -> int:
    """Bytes that the first device says it has; the machine's memory where it doesn't say."""
    reported = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    return reported or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


class _Program:
    """The computations of an optimized HLO module, by name."""

    def __init__(self, text: str) -> None:
        self._computations: dict[str, list[_Instruction]] = {}
        self._flops: dict[str, int] = {}
        body: list[_Instruction] = []
        for line in text.splitlines():
            if found := _INSTRUCTION.match(line):
                body.append(_Instruction(*found.groups()))
            elif found := _COMPUTATION.match(line):
                body = self._computations[found.group(1)] = []
                if line.startswith("ENTRY"):
                    self._entry = found.group(1)

    def flops(self) -> int:
        """Of the whole program."""
        return self._of(self._entry)

    def _of(self, computation: str) -> int:
        if computation not in self._flops:
            body = self._computations[computation]
            types = {instruction.name: instruction.type for instruction in body}
            self._flops[computation] = sum(self._of_one(instruction, types) for instruction in body)
        return self._flops[computation]

    def _of_one(self, instruction: _Instruction, types: dict[str, str]) -> int:
        _, result, operation, rest = instruction
        if operation == "dot":
            return 2 * math.prod(_sizes(result)) * _contracted(rest, types)
        if operation == "convolution" or _LIBRARY_PRODUCT.search(rest):
            raise ValueError(f"cannot count the matrix product {operation}({rest[:100]}")
        if operation == "while":
            times = _TRIP_COUNT.search(rest)
            return (int(times[1]) if times else 1) * sum(map(self._of, _BODY.findall(rest)))
        branches = [name.strip(" %") for found in _BRANCHES.findall(rest) for name in found.split(",")]
        return max(map(self._of, branches), default=0) + sum(map(self._of, _CALLED.findall(rest)))


def _sizes(type_: str) -> list[int]:
    """The axes of an array type such as f32[3,8]{1,0}."""
    return [int(size) for size in _SHAPE.findall(type_)[0].split(",") if size]


def _contracted(rest: str, types: dict[str, str]) -> int:
    """Over how many products each entry of a dot's result sums."""
    operand_type, operand = _OPERAND.findall(rest)[0]
    sizes = _sizes(operand_type or types[operand])
    return math.prod(sizes[int(axis)] for axis in _CONTRACTED.findall(rest)[0].split(",") if axis)
