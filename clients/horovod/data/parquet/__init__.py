"""A reader of Parquet data sets for training: every rank its rows, shuffled, as batches of NumPy arrays.

reader.py      ParquetReader, which users iterate over
plan.py        which rows a rank owns, and their order; pure
row_groups.py  the row groups of a data set, on any file system
columns.py     Arrow's columns as NumPy's arrays, shuffled and cut into batches
"""
