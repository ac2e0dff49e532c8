"""Where scripts of earlier releases look for parts of elastic training, which are in horovod.common.elastic."""
