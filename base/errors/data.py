"""Codes of data sets and of the stores that hold them."""

from .code import ErrorCode


class DataCode(ErrorCode):
    """A data set or a store can't be used, or holds something that training can't take."""

    MISSING_DATA_PACKAGE = (
        "missing-data-package",
        "A package that reads the data or reaches the store is not installed on this host. Install it.",
    )
    UNREADABLE_DATA = (
        "unreadable-data",
        "A path has no Parquet files, or a file of it can't be read. The sentence says which one, and why.",
    )
    MISSING_COLUMN = ("missing-column", "A column is not in the data set, or not in one of its files. Check its name.")
    UNSUPPORTED_COLUMN = (
        "unsupported-column",
        "A column has a type of which no array can be made, or text where a model takes numbers. Convert it before.",
    )
    NULL_VALUE = (
        "null-value",
        "A column that is read has a row without a value. Fill or drop such rows before the data is written.",
    )
    NOT_FINITE = (
        "not-finite",
        "A column to train on has NaN or an infinity, which would make all weights NaN. Replace or drop such rows.",
    )
    DIFFERENT_SHAPES = (
        "different-shapes",
        "Lists or vectors of one column have unlike sizes. Make them alike before the data is written.",
    )
    TOO_FEW_ROWS = ("too-few-rows", "There are no rows to train or to validate with, or fewer than processes.")
    NOTHING_TO_REPEAT = (
        "nothing-to-repeat",
        "An endless reader has no rows to repeat: the data set has fewer rows than there are ranks. Use fewer ranks.",
    )
    INVALID_BATCH = (
        "invalid-batch",
        "A transformation_fn failed, or returned something that is no batch. Return what it got, changed.",
    )
    DATA_STORE_FAILED = (
        "data-store-failed",
        "A store refuses a request, or does not answer. Look at the bucket, the credentials, the endpoint or the disk.",
    )
    WRONG_STORE_PATH = (
        "wrong-store-path",
        "A path does not belong to this kind of store, or to the file system that the store was made for.",
    )
