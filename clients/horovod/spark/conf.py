"""Settings of Spark that matter to elastic jobs, as (key, value), for SparkConf.set(*pair).

    conf = SparkConf().set(*SPARK_CONF_ALWAYS_RESTART_FAILED_TASK)

Releases of Spark before 3.1 said `blacklist` where it is now `excludeOnFailure`, and the names here have kept the word.
"""

from __future__ import annotations

from typing import Final

_GREATEST: Final = str((1 << 31) - 1)
_ONE_LESS: Final = str((1 << 31) - 2)

# A task that fails is run again, as often as it takes. By default the fourth failure ends the job.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK: Final = ("spark.task.maxFailures", _GREATEST)

# Whether executors and nodes on which tasks fail get no further ones. What follows acts only where they do.
SPARK_CONF_BLACKLIST_DISABLED: Final = ("spark.excludeOnFailure.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED: Final = ("spark.excludeOnFailure.enabled", "true")

# After how many failures of one task an executor, or a node, gets it no more.
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK: Final = (
    "spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor",
    _GREATEST,
)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK: Final = ("spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor", "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK: Final = ("spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor", "1")
# Spark refuses as many as spark.task.maxFailures: the node must be excluded before the job is given up.
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK: Final = ("spark.excludeOnFailure.task.maxTaskAttemptsPerNode", _ONE_LESS)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK: Final = ("spark.excludeOnFailure.task.maxTaskAttemptsPerNode", "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK: Final = ("spark.excludeOnFailure.task.maxTaskAttemptsPerNode", "1")

# After how many failed tasks of one stage an executor gets none of it, and after how many such executors a node.
SPARK_CONF_REUSE_FAILED_EXECUTOR: Final = ("spark.excludeOnFailure.stage.maxFailedTasksPerExecutor", _GREATEST)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR: Final = ("spark.excludeOnFailure.stage.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILED_NODE: Final = ("spark.excludeOnFailure.stage.maxFailedExecutorsPerNode", _GREATEST)
SPARK_CONF_DONT_REUSE_FAILED_NODE: Final = ("spark.excludeOnFailure.stage.maxFailedExecutorsPerNode", "1")

# The same for all stages of the application.
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP: Final = (
    "spark.excludeOnFailure.application.maxFailedTasksPerExecutor",
    _GREATEST,
)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP: Final = (
    "spark.excludeOnFailure.application.maxFailedTasksPerExecutor",
    "1",
)
SPARK_CONF_REUSE_FAILED_NODE_IN_APP: Final = ("spark.excludeOnFailure.application.maxFailedExecutorsPerNode", _GREATEST)
SPARK_CONF_DONT_REUSE_FAILED_NODE_IN_APP: Final = ("spark.excludeOnFailure.application.maxFailedExecutorsPerNode", "1")

# The names that programs for Horovod 0.28 use.
SPARK_CONF_MAX_INT: Final = _GREATEST
SPARK_CONF_MAX_INT_MINUS_ONE: Final = _ONE_LESS
SPARK_CONF_REUSE_FAILING_NODE: Final = SPARK_CONF_REUSE_FAILED_NODE
SPARK_CONF_DONT_REUSE_FAILING_NODE: Final = SPARK_CONF_DONT_REUSE_FAILED_NODE
SPARK_CONF_REUSE_FAILING_NODE_IN_APP: Final = SPARK_CONF_REUSE_FAILED_NODE_IN_APP
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP: Final = SPARK_CONF_DONT_REUSE_FAILED_NODE_IN_APP

# Spark's own values, by key.
SPARK_CONF_DEFAULT_VALUES: Final = {
    "spark.task.maxFailures": "4",
    "spark.excludeOnFailure.enabled": "false",
    "spark.excludeOnFailure.task.maxTaskAttemptsPerExecutor": "1",
    "spark.excludeOnFailure.task.maxTaskAttemptsPerNode": "2",
    "spark.excludeOnFailure.stage.maxFailedTasksPerExecutor": "2",
    "spark.excludeOnFailure.stage.maxFailedExecutorsPerNode": "2",
    "spark.excludeOnFailure.application.maxFailedTasksPerExecutor": "2",
    "spark.excludeOnFailure.application.maxFailedExecutorsPerNode": "2",
}
