"""What the estimators share: stores, data, backends."""
