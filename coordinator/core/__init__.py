"""Pure decisions: no clock, no socket, no store. Time is an argument; every answer comes with its sentence."""
