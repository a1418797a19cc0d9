// The seam between emulated devices and the emulated NCCL (emulated/libnccl/): a library with NCCL's C names, opened
// through the same variable as a real one. The loader hands it this table by its function ar_emulated_nccl_bind.
#pragma once

#include <cstddef>

struct ar_emulated_nccl_part {
  const void* send;
  void* recv;
  void* stream;
  int device;
};

struct ar_emulated_nccl_host {
  int (*current_device)();
  // What the ranks of one communicator share. Never freed: kernels and graphs may look at it for as long as they like.
  void* (*room)();
  // Enqueues one all-reduce of n ranks, a kernel on each one's stream: count elements of an NCCL type, sum or
  // (average != 0) mean, each rounded to the type at every hop as a ring does. hang != 0: it ends only when aborted. 0, or
  // a runtime code.
  int (*allreduce)(void* room, const ar_emulated_nccl_part* parts, int n, size_t count, int type, int average,
                   int hang);
  // abort != 0: what runs for this rank, and what graphs launch later, ends at once. Returns when no graph that captured
  // the communicator is left, as NCCL's own calls do.
  void (*leave)(void* room, int rank, int abort);
  // On the current device.
  int (*malloc)(void** p, size_t bytes);
  int (*free)(void* p);
};
