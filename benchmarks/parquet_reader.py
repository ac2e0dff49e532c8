#!/usr/bin/env python3
"""One epoch of a Parquet data set, read by two ranks: horovod.data.ParquetReader beside what one would use instead.

    python benchmarks/parquet_reader.py              200,000 rows of 64 float32 and a number; half a minute
    python benchmarks/parquet_reader.py --quick      does everything work? The figures mean nothing

Each reader is a process of its own, and reads its part of the rows in shuffled batches (TorchDistributor's: in order).
The ways take turns; a round of one is from a barrier until the last reader has all its rows.

    ParquetReader           the 64 floats are a column of lists, in row groups of 25,000 rows
    ParquetReader, columns  the 64 floats are 64 columns
    ParquetReader, cached   the epoch after the first, with cache=True
    DataLoader of pandas    pandas.read_parquet, the rank's rows as tensors, torch's DataLoader(shuffle=True) over them
    rows of Arrow           what TorchDistributor.train_on_dataframe has in each process: a DataLoader over an iterator
                            of the rows of an Arrow file on the local disk. Spark writes that file, which is not timed

rows/s          of all readers together, the median of the rounds
CPU s per 100k  of all readers together, their threads and child processes included

Every row must come once, with its values; otherwise the exit code is 1.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import resource
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks import report

RESULTS: Final = Path(__file__).resolve().parent / "results"
FLOATS: Final = 64
SEED: Final = 7
_DEADLINE_S: Final = 300  # of one round
Batches = Iterator[tuple[np.ndarray, np.ndarray]]  # numbers of rows, and what belongs to them: (rows, FLOATS)


def main(argv: Sequence[str] | None = None) -> int:
    options = _parse(argv)
    return report.until_interrupted(lambda: _run(options))


def _run(options: argparse.Namespace) -> int:
    report.tell_load()
    about = report.machine({})
    with tempfile.TemporaryDirectory(prefix="horovod-parquet-") as folder:
        _write(Path(folder), options)
        found, failures = _measure(folder, options)
    if failures:
        print(report.brief(failures[0]), file=sys.stderr)
    else:
        print(
            f"{options.rows} rows of {FLOATS} floats, {options.readers} readers on {about['cores']} processors, ",
            end="",
        )
        print(f"batches of {options.batch_size}")
        print(f"{'':24}{'rows/s':>12}{'CPU s per 100k':>16}")
        for name in WAYS:
            rounds = found[name]
            rate, cpu = (statistics.median(one[key] for one in rounds) for key in ("rows_per_second", "cpu_per_100k"))
            print(f"{name:24}{rate:>12,.0f}{cpu:>16.3f}")
    document = {
        "machine": about,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rows": options.rows,
        "readers": options.readers,
        "batch_size": options.batch_size,
        "rounds": found,
        "failures": failures,
    }
    report.write_json(options.json, document)
    return 1 if failures else 0


def _write(folder: Path, options: argparse.Namespace) -> None:
    """The data set as lists and as columns, and each reader's rows as an Arrow file."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    values = np.random.default_rng(SEED).random((options.rows, FLOATS), dtype=np.float32)
    number = np.arange(options.rows)
    offsets = np.arange(0, FLOATS * options.rows + 1, FLOATS, dtype=np.int32)
    lists = pa.table({"number": number, "values": pa.ListArray.from_arrays(offsets, values.reshape(-1))})
    columns = pa.table({"number": number, **{f"v{place}": values[:, place].copy() for place in range(FLOATS)}})
    group = max(1, options.rows // 8)
    pq.write_table(lists, folder / "lists.parquet", row_group_size=group)
    pq.write_table(columns, folder / "columns.parquet", row_group_size=group)
    for rank in range(options.readers):
        part = _part(options.rows, rank, options.readers)
        with pa.ipc.new_stream(folder / f"{rank}.arrow", lists.schema) as stream:
            stream.write_table(lists.slice(part.start, len(part)), max_chunksize=10_000)


def _part(rows: int, rank: int, size: int) -> range:
    return range(rows * rank // size, rows * (rank + 1) // size)


def _measure(folder: str, options: argparse.Namespace) -> tuple[dict[str, list[dict[str, float]]], list[str]]:
    """For each way its rounds; and what went wrong."""
    context = multiprocessing.get_context("spawn")
    barrier, answers = context.Barrier(options.readers), context.Queue()
    readers = [
        context.Process(target=_reader, args=(rank, folder, options, barrier, answers))
        for rank in range(options.readers)
    ]
    for reader in readers:
        reader.start()
    found: dict[str, list[dict[str, float]]] = {}
    failures: list[str] = []
    ended = False
    try:
        # A queue sends from a thread, so a reader's answer may come behind the other reader's next one.
        took: dict[tuple[int, str], list[dict[str, Any]]] = {}
        for _ in range(options.rounds * len(WAYS) * options.readers):
            answer = answers.get(timeout=_DEADLINE_S)
            if answer["failure"]:
                failures.append(answer["failure"])
                break
            took.setdefault((answer["round"], answer["way"]), []).append(answer)
        for (_, way), of_readers in sorted(took.items()):
            seconds, cpu = max(one["seconds"] for one in of_readers), sum(one["cpu"] for one in of_readers)
            figures = {"rows_per_second": options.rows / seconds, "cpu_per_100k": cpu / options.rows * 1e5}
            found.setdefault(way, []).append(figures)
        ended = not failures
    finally:
        for reader in readers:
            if not ended:
                reader.terminate()
            reader.join()
    return found, failures


def _reader(rank: int, folder: str, options: argparse.Namespace, barrier: Any, answers: Any) -> None:
    """A process: an epoch of each way in each round."""
    import pandas  # noqa: F401 - imports are not timed
    import torch

    warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # rows of Arrow, which are only read
    torch.set_num_threads(1)
    part = _part(options.rows, rank, options.readers)
    expected = _totals(np.arange(part.start, part.stop), _values(options.rows)[part.start : part.stop])
    for number in range(options.rounds):
        names = list(WAYS) if number % 2 == 0 else list(reversed(WAYS))
        for name in names:
            epoch = WAYS[name](folder, rank, options)
            barrier.wait(_DEADLINE_S)
            begun, cpu = time.perf_counter(), _cpu_seconds()
            failure, rows, sums = "", 0, []
            try:
                for numbers, values in epoch():
                    rows += len(numbers)
                    sums.append(_totals(numbers, values[:, :1]))  # one value of each: reading is measured, not adding
            except Exception as error:
                failure = f"{name}: {error!r}"
            seconds, cpu = time.perf_counter() - begun, _cpu_seconds() - cpu
            if not failure and (rows != len(part) or not np.allclose(np.sum(sums, 0), expected)):
                failure = f"{name}: the rows of reader {rank} did not come once each"
            answers.put({"round": number, "way": name, "seconds": seconds, "cpu": cpu, "failure": failure})
            if failure:
                barrier.abort()
                return


def _values(rows: int) -> np.ndarray:
    return np.random.default_rng(SEED).random((rows, FLOATS), dtype=np.float32)


def _totals(numbers: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """The sum of the numbers, and that of the first values by number: a value in another row changes it."""
    numbers = numbers.astype(np.float64)
    return float(numbers.sum()), float(numbers @ values[:, 0].astype(np.float64))


def _cpu_seconds() -> float:
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def _parquet_reader(folder: str, rank: int, options: argparse.Namespace, file: str, **how: Any) -> Any:
    from horovod.data import ParquetReader

    path = f"{folder}/{file}.parquet"
    return ParquetReader(path, batch_size=options.batch_size, rank=rank, size=options.readers, **how)


def _lists(folder: str, rank: int, options: argparse.Namespace) -> Callable[[], Batches]:
    def epoch() -> Batches:
        for batch in _parquet_reader(folder, rank, options, "lists"):
            yield batch["number"], batch["values"]

    return epoch


def _columns(folder: str, rank: int, options: argparse.Namespace) -> Callable[[], Batches]:
    def epoch() -> Batches:
        for batch in _parquet_reader(folder, rank, options, "columns"):
            yield batch["number"], batch["v0"][:, None]

    return epoch


def _cached(folder: str, rank: int, options: argparse.Namespace) -> Callable[[], Batches]:
    reader = _parquet_reader(folder, rank, options, "lists", cache=True)
    for _batch in reader:
        pass

    def epoch() -> Batches:
        for batch in reader:
            yield batch["number"], batch["values"]

    return epoch


def _pandas(folder: str, rank: int, options: argparse.Namespace) -> Callable[[], Batches]:
    def epoch() -> Batches:
        import pandas
        import torch
        from torch.utils.data import DataLoader, TensorDataset

        part = _part(options.rows, rank, options.readers)
        frame = pandas.read_parquet(f"{folder}/lists.parquet").iloc[part.start : part.stop]
        values = torch.from_numpy(np.stack(frame["values"].to_list()))
        rows = TensorDataset(torch.from_numpy(frame["number"].to_numpy(copy=True)), values)
        for numbers, of_them in DataLoader(rows, options.batch_size, shuffle=True):
            yield numbers.numpy(), of_them.numpy()

    return epoch


def _arrow_rows(folder: str, rank: int, options: argparse.Namespace) -> Callable[[], Batches]:
    def epoch() -> Batches:
        import pyarrow as pa
        from torch.utils.data import DataLoader, IterableDataset

        class Rows(IterableDataset):  # type: ignore[type-arg]
            def __iter__(self) -> Iterator[list[Any]]:
                with pa.ipc.open_stream(f"{folder}/{rank}.arrow") as stream:
                    for batch in stream:
                        yield from map(list, batch.to_pandas().itertuples(index=False))

        for numbers, values in DataLoader(Rows(), options.batch_size):
            yield numbers.numpy(), values.numpy()

    return epoch


WAYS: Final[dict[str, Callable[[str, int, argparse.Namespace], Callable[[], Batches]]]] = {
    "ParquetReader": _lists,
    "ParquetReader, columns": _columns,
    "ParquetReader, cached": _cached,
    "DataLoader of pandas": _pandas,
    "rows of Arrow": _arrow_rows,
}


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--readers", type=int, default=2)
    parser.add_argument("--batch-size", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="few rows, one round: does everything work?")
    parser.add_argument(
        "--json", type=Path, default=RESULTS / "parquet_reader.json", help="where figures are written to"
    )
    options = parser.parse_args(argv)
    if min(options.rows, options.readers, options.batch_size, options.rounds) < 1:
        parser.error("--rows, --readers, --batch-size and --rounds are numbers from 1 on")
    if options.quick:
        options.rows, options.rounds = 2000, 1
    return options


if __name__ == "__main__":
    sys.exit(main())
