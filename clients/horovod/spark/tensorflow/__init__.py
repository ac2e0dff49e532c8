"""TensorFlow on Spark: `compute_worker` runs a tf.data service in the tasks of a Spark job."""
