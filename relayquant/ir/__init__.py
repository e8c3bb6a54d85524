"""Between a float model and its code: Relax and how it is rewritten, the `relax.qnn` operators and
their meaning in numpy, the rows of quantizable operators, the plan and the ledger.
"""
