"""gRPC servicers. They translate, ask `core`, write the store and fan out; no decisions are made here."""
