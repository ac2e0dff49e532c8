"""What a training process loads: its session with the coordinator, the world, the data-plane sockets, the engine."""
