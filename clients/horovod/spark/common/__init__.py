"""The parts that estimators share: stores, data, backends."""
