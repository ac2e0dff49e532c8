"""Where older scripts look for parts of elastic training; they are in horovod.common.elastic."""
