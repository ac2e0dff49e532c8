"""What processes a job is to have, and what follows when they end: one target record, and one pure decision."""
