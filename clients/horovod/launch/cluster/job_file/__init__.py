"""The job file of `horovodrun submit`: read, checked, its code packed, submitted."""
