"""Finds collectives of a compiled CPU program whose order is left to the runtime."""

from decjax.hlo.program import COLLECTIVES, Instruction, Program


def unordered(hlo: str) -> list[tuple[str, str]]:
    """Pairs of instructions with collectives that devices may start in different orders, so that they wait for ever; by name.

    Neither instruction of a pair depends on the other, both are in one computation, and at least one is a loop, a branch or a call.
    The CPU runtime orders the collectives of one computation itself, but those in the bodies of loops, branches and calls only in
    programs that do not come from the compilation cache.

    Args:
        hlo: `compiled.as_text()`.
    """
    program = Program(hlo)
    return [pair for instructions in program.computations.values() for pair in _pairs(program, instructions)]


def _pairs(program: Program, instructions: list[Instruction]) -> list[tuple[str, str]]:
    needs: dict[str, set[str]] = {}  # For each instruction those with collectives that it depends on.
    senders: dict[str, bool] = {}  # For each instruction with collectives, whether they are in a body that it runs.
    found = []
    here = {instruction.name: instruction for instruction in instructions}
    for instruction in instructions:
        operands = [here[name] for name in _sources(instruction, here)]
        needs[instruction.name] = set().union(*(needs[operand.name] for operand in operands))
        inside = any(inner.kind in COLLECTIVES for inner in program.below(instruction))
        if inside or instruction.kind in COLLECTIVES:
            free = [name for name in senders if name not in needs[instruction.name] and (inside or senders[name])]
            found += [(name, instruction.name) for name in free]
            needs[instruction.name].add(instruction.name)
            senders[instruction.name] = inside
    return found


def _sources(instruction: Instruction, here: dict[str, Instruction]) -> tuple[str, ...]:
    """The operands that an instruction waits for; of a tuple's element only that element, since tuples wait for none."""
    if instruction.opcode != "get-tuple-element":
        return instruction.operands
    operand = here[instruction.operands[0]]
    while operand.opcode == "get-tuple-element" and (source := _sources(operand, here)) != operand.operands:
        operand = here[source[0]]
    if operand.opcode != "tuple":
        return (operand.name,)
    return (operand.operands[int(instruction.line.partition("index=")[2].split(",")[0])],)
