"""Where programs change how often hosts are looked for: this module is horovod.launch.elastic.times itself.

Names that were imported from there would be copies, and a program that sets them would change nothing.
"""

import sys

from horovod.launch.elastic import times
from horovod.launch.elastic.times import DISCOVER_HOSTS_FREQUENCY_SECS as DISCOVER_HOSTS_FREQUENCY_SECS
from horovod.launch.elastic.times import ELASTIC_TIMEOUT_SECS as ELASTIC_TIMEOUT_SECS

sys.modules[__name__] = times
