"""Steps of unrolled recurrent layers -> one operator: rule `join_cells`."""
