"""Programs as data: traced ones (jaxprs), which are sliced and interpreted, and compiled ones (HLO), whose text is read.

jaxpr       slices of a traced program, such as those before, between and after its messages
liveness    the memory that a traced program needs
order       one order of the collectives of a CPU program
hlo         a compiled program's instructions, and the bytes that it sends
"""
