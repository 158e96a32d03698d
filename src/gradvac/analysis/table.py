"""Similarities as a table: one row for every step, component and pair of tasks.

    similarities.to_frame()                      # a pandas DataFrame
    write_table("similarity.csv", [run])         # or .parquet; `gradvac report RUN --table FILE`

Pairs are those below the diagonal; unknown ones are left out.
"""

# S steps, K components, T tasks

import csv
import io
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from gradvac.utils.files import replacing
from gradvac.utils.hints import install_line

if TYPE_CHECKING:
    from gradvac.analysis.run import Run
    from gradvac.analysis.similarities import Similarities

Columns = dict[str, NDArray[Any]]

_FORMATS = (".csv", ".parquet")


def pair_columns(similarities: "Similarities") -> Columns:
    """Columns step, component, task, other, cosine, reliability: one entry for every known pair.

    The reliability of a pair is the geometric mean of its tasks'; NaN where it was not measured.
    """
    rows, columns = np.tril_indices(len(similarities.tasks), -1)
    cosines = similarities.values[:, :, rows, columns]  # [S, K, pairs]
    s, k, p = np.nonzero(~np.isnan(cosines))
    tasks, components = np.array(similarities.tasks), np.array(similarities.components)
    reliability = np.full(len(s), np.nan)
    if similarities.reliability is not None:
        own = similarities.reliability
        product = own[s, k, columns[p]] * own[s, k, rows[p]]
        reliability = np.sqrt(np.where(product > 0, product, np.nan), dtype=np.float64)
    return {
        "step": similarities.steps[s],
        "component": components[k],
        "task": tasks[columns[p]],
        "other": tasks[rows[p]],
        "cosine": cosines[s, k, p],
        "reliability": reliability,
    }


def frame(columns: Mapping[str, Any]) -> Any:
    """The columns as a pandas DataFrame."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(f"to_frame: needs pandas; {install_line('datasets')}.") from error
    return pandas.DataFrame(dict(columns))


def write_table(path: str | Path, runs: Sequence["Run"]) -> int:
    """Write all similarities of some runs, with columns run and source before those of pairs.

    Args:
        path: A file that ends in .csv, or in .parquet (which needs pyarrow).
        runs: From `load_run`.

    Returns:
        The number of rows.
    """
    path = Path(path)
    if path.suffix not in _FORMATS:
        raise ValueError(f"path: must end in {' or '.join(_FORMATS)}, got {path.name!r}.")
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        return _write_parquet(path, runs)
    num = 0
    with replacing(path) as file:
        text = io.TextIOWrapper(file, encoding="utf-8", newline="")
        writer = csv.writer(text, lineterminator="\n")
        for columns in _all_columns(runs):
            if not num:
                writer.writerow(columns)
            values = [_shown(column) for column in columns.values()]
            writer.writerows(zip(*values, strict=True))
            num += len(values[0])
        text.detach()  # which also writes what is left
    return num


def _all_columns(runs: Sequence["Run"]) -> Iterator[Columns]:
    from gradvac.analysis import views

    for run in runs:
        for name, source in views.sources(run).items():
            columns = pair_columns(source)
            size = len(columns["step"])
            yield {"run": np.full(size, run.name), "source": np.full(size, name), **columns}


def _shown(column: NDArray[Any]) -> list[Any]:
    if column.dtype.kind != "f":
        return list(column.tolist())
    return ["" if np.isnan(value) else f"{value:.6g}" for value in column.tolist()]


def _write_parquet(path: Path, runs: Sequence["Run"]) -> int:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError("table: a .parquet file needs pyarrow; write a .csv file.") from error
    tables = [pyarrow.table(columns) for columns in _all_columns(runs)]
    whole = pyarrow.concat_tables(tables)
    with replacing(path) as file:
        parquet.write_table(whole, file)
    return int(whole.num_rows)
