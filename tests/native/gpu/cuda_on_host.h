// Just enough of CUDA C++ to compile a kernel for the host, whose threads then run one after another.
#pragma once

#define __device__
#define __global__
#define __launch_bounds__(threads)

struct Index3 {
  unsigned x = 0, y = 0, z = 0;
};
static thread_local Index3 threadIdx, blockIdx;

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};
