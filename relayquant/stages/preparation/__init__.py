"""Preparation: float module of any frontend -> float module in canonical form.

canonical     the list of rules, and the function that applies them
engine        applies rules until none fires
rules         the rules by family
cells         recurrent cells that a model has unrolled -> one operator
finite        checks of parameters before any data is read
norm_statistics
              what batch norms know of the data of training
"""

from relayquant.stages.preparation.canonical import prepare_module

__all__ = ["prepare_module"]
