"""What compiled programs say of themselves: their text in HLO, read.

program     computations and instructions
wire        the collectives, and the bytes that they send
overlap     what is computed while a message travels
order       collectives that a CPU program leaves in no order
"""
