"""What coordinator, worker and launchers share: words, settings, limits, tokens, proofs, TLS, telemetry.

The lowest floor beside `protos`: it imports nothing of Horovod but that. What only one of them needs is not here.
"""
