"""What all framework bindings share."""
