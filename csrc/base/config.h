// Plain settings of an engine. Its creator fills them in; nothing here reads the environment.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

namespace horovod {

// What is done to the bytes of a connection of the data plane.
enum class WireMode : uint8_t { plain = 0, authenticated = 1, encrypted = 2 };

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
  // How long the host of a peer may acknowledge nothing, over TCP, before the peer counts as lost. Kernels do that,
  // also for a process that is stopped.
  int64_t unreachable_timeout_ms = 20'000;
  // Once the epoch is over: how long close() waits for a thread that is in the middle of an operation.
  int64_t close_timeout_ms = 30'000;
  // A rank that waits for one peer may have data of another that it can't use yet. How often it looks whether that
  // other peer's epoch has ended, which the peer says behind the data.
  int64_t look_ahead_us = 100'000;
  // Shared-memory staging: bytes of one buffer and number of buffers of each rank. Must agree on all ranks of a host.
  size_t staging_buffer_bytes = 256u << 10;
  int staging_buffer_count = 4;
  // The processor that the background thread runs on; -1 leaves the choice to the kernel.
  int background_cpu = -1;
  // Members connected by a mesh move tensors with Gloo's algorithms. Must agree on all ranks.
  bool gloo = false;
  // Up to so many members of a communicator over sockets each is connected to every other; of more, to some of them
  // (collectives/partners.h). Must agree on all ranks.
  int full_mesh_members = 64;
  // A connection that alone leads to a peer stays open after the last word of an epoch, so that it may serve the next
  // one: Mesh::hand_over().
  bool keeps_connections = false;
  // Connections are sealed with keys of their own. Must agree on all ranks.
  WireMode wire = WireMode::plain;
  // OpenSSL's libcrypto, where they are; empty means the system's.
  std::string crypto_file;
  uint64_t wire_records_per_key = 1u << 20;  // must agree on all ranks
  // For tensors on a GPU: the files of the driver, of NCCL and of NVIDIA's run-time compiler. Empty means the system's.
  std::string cuda_file, nccl_file, nvrtc_file;
  // How many batches may overlap on the device. Must agree on all ranks.
  int nccl_streams = 1;
  // One bit for each OpType: operations that demand NCCL, and operations that go through the host's memory even where
  // there is NCCL. All others use NCCL where all ranks have it.
  unsigned nccl_operations = 0, host_operations = 0;
  // GPU tensors that go through the host's memory go in chunks of this many bytes. Must agree on all ranks.
  size_t staging_bytes = 4u << 20;
  // When at least gpu_pack_count tensors of one dtype have up to gpu_pack_threshold_bytes each, they are copied into
  // one buffer (of up to fusion_threshold_bytes) and run as one. 0 bytes turns that off. Both must agree on all ranks.
  size_t gpu_pack_threshold_bytes = 64u << 10;
  size_t gpu_pack_count = 8;
  // One kernel makes these copies; it is compiled when the first tensor on a GPU comes. Otherwise they are made one
  // after another.
  bool batched_copies = true;
  // wait() leaves the waiting to the caller's stream and returns; otherwise the host waits until the result is there.
  bool async_completion = true;

  // Gloo's algorithms let each member exchange something with every other.
  bool is_full_mesh(int members) const { return gloo || members <= full_mesh_members; }
};

}  // namespace horovod
