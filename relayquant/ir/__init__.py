"""The intermediate representation that all stages share: rewriting of Relax functions, the
`relax.qnn` operators and their meaning in numpy, the rows of quantizable operators, the plan and
the ledger.
"""
