"""Reads the HLO text of compiled programs: what they send, and what they compute meanwhile.

    program     computations and instructions
    wire        the collectives, and the bytes that they send
    overlap     what is computed while a message travels
    order       collectives of a CPU program whose order is not fixed

The text is that of `compiled.as_text()`.
"""
