"""The options of `horovodrun`, its file of settings, and its answers without a job (--completion, --check-build)."""
