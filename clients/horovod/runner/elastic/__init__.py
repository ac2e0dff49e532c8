"""What an elastic job is asked for (request.py), and where older scripts look for parts of elastic training, which are
in horovod.common.elastic."""
