"""How columns are stored between Spark and the training; columns.py says what each means."""

ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
