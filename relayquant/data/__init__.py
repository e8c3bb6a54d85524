"""The user's data set -> checked batches: dicts of arrays in input order.

All data is untrusted. Archives are read without pickle and piece by piece. Each batch is checked
against the model's inputs before compiled code sees it.
"""

from relayquant.data.dataset import Dataset, open_dataset
from relayquant.data.item import Batch, InputInfo, convert_item, count_samples
from relayquant.data.sampling import (
    CalibrationShare,
    SpreadSample,
    count_first,
    has_free_batch,
    open_share,
    take_samples,
)
from relayquant.data.sequence import SampleSequence, StreamedDataset, open_sequences

__all__ = [
    "Batch",
    "CalibrationShare",
    "Dataset",
    "InputInfo",
    "SampleSequence",
    "SpreadSample",
    "StreamedDataset",
    "convert_item",
    "count_first",
    "count_samples",
    "has_free_batch",
    "open_dataset",
    "open_sequences",
    "open_share",
    "take_samples",
]
