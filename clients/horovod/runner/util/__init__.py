"""Folders of earlier releases, from which scripts import (horovod/common/compatibility.py)."""
