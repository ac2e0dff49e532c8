"""Data loaders by the names that data modules of older programs import: `pytorch_data_loaders`."""
