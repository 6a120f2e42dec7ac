"""Files of a data set as it lies on a hub."""

import io
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

GSM_CARD = b"""---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/test-*
- config_name: socratic
  data_files:
  - split: train
    path: socratic/train-*
---
"""


def parquet_of(rows: list[dict[str, Any]]) -> bytes:
    """A Parquet file with these rows."""
    written = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), written)
    return written.getvalue()
