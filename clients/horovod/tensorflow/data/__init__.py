"""Input pipelines in processes of their own, by TensorFlow's tf.data service: see compute_service."""
