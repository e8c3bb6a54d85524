"""From whatever the user calls a data set to checked batches: dicts of arrays, in input order.

Everything that comes in is untrusted: archives are read without pickle and piece by piece, and each
batch is checked against the model's inputs before any of it reaches compiled code.
"""

from relayquant.data.dataset import Dataset, open_dataset
from relayquant.data.item import Batch, InputInfo, convert_item, count_samples
from relayquant.data.sampling import SpreadSample, has_free_batch, take_samples

__all__ = [
    "Batch",
    "Dataset",
    "InputInfo",
    "SpreadSample",
    "convert_item",
    "count_samples",
    "has_free_batch",
    "open_dataset",
    "take_samples",
]
