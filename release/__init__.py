"""What makes a release: `make wheels` (wheels.py) and `make release` (check.py): see docs/releasing.md."""
