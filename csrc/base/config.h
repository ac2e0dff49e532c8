// Plain settings of an engine. Whoever creates the engine fills them in; nothing here reads the environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace horovod {

struct Config {
  // Operations are fused into one batch up to this many bytes; 0 turns fusion off. Must agree on all ranks.
  size_t fusion_threshold_bytes = 128u << 20;
  // How long a waiting thread polls before it sleeps in the kernel. Never more than a few milliseconds.
  int64_t spin_us = 50;
  // How long a caller that is blocked in wait() goes on polling, giving the processor away at each turn, before it
  // sleeps.
  int64_t yield_us = 2'000;
  // Once every rank has agreed to run an operation: how long a peer may make no progress in it before the epoch ends.
  int64_t progress_timeout_ms = 300'000;
  // Shared-memory staging: bytes of one slot and number of slots of each rank. Must agree on all ranks of a host.
  size_t slot_bytes = 512u << 10;
  int slot_count = 4;
  // The processor that the background thread runs on; -1 leaves the choice to the kernel.
  int background_cpu = -1;
  // Members connected by a mesh move tensors with Gloo's algorithms. Must agree on all ranks.
  bool gloo = false;
  // For tensors on a GPU. The files of the driver and of NCCL; empty: the system's.
  std::string cuda_file, nccl_file;
  // So many batches may overlap on the device. Must agree on all ranks.
  int nccl_streams = 1;
  // wait() leaves the waiting to the caller's stream and returns; otherwise the host waits until the result is there.
  bool async_completion = true;
};

}  // namespace horovod
